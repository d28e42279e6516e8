"""Command-line flags made from the configuration: one per key, same name with dashes. The command line adds none of
its own to what can be configured, so a flag, a variable and a line of the YAML file always say the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from runtime.config import Config

_F = TypeVar("_F", bound=Callable[..., Any])


def _option(key: str, annotation: Any, default: Any) -> click.Option:
    dashed = key.replace("_", "-")
    if annotation is bool:
        return click.Option([f"--{dashed}/--no-{dashed}", key], default=None, help=f"[{'on' if default else 'off'}]")
    kind: Any = click.Choice(list(get_args(annotation))) if get_origin(annotation) is Literal else annotation
    shown = "" if default == "" else f"[{default}]"
    return click.Option([f"--{dashed}", key], type=kind, default=None, help=shown)


def configured(function: _F) -> _F:
    """Give a click command every configuration flag and --config; it is called with `config`, loaded and valid."""

    @click.pass_context
    @functools.wraps(function)
    def run(context: click.Context, /, config_file: str | None, **given: Any) -> Any:
        flags = {key: given.pop(key) for key in Config.model_fields}
        return context.invoke(function, config=Config.load(flags, config_file), **given)

    params: list[click.Parameter] = [
        click.Option(["--config", "config_file"], type=click.Path(dir_okay=False), help="YAML file with the same keys")
    ]
    params += [_option(key, info.annotation, info.default) for key, info in Config.model_fields.items()]
    existing: list[click.Parameter] = list(getattr(function, "__click_params__", []))
    run.__click_params__ = params[::-1] + existing  # type: ignore[attr-defined]  # click reverses the list
    return run  # type: ignore[return-value]

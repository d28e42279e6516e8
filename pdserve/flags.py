"""Command-line flags made from the configuration: one per key, same name with dashes. The command line adds none of
its own to what can be configured, so a flag, a variable and a line of the YAML file always say the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from runtime.config import Config
from runtime.config_keys import FIRST, section_of

_F = TypeVar("_F", bound=Callable[..., Any])

MANY = 20
"""Keys of a help from which on the common ones are repeated to nobody: they stand first, and not under their title."""


class Command(click.Command):
    """Lists its own options first, then the common keys of the configuration, then the others by what they are about.
    It takes every key, and lists those that it reads."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        keys = {param.name or "": param for param in self.get_params(ctx) if isinstance(param, _Key)}
        common = FIRST if sum(not key.hidden for key in keys.values()) > MANY else ()
        own = [param for param in self.get_params(ctx) if not isinstance(param, _Key)]
        sections: dict[str, list[click.Parameter]] = {"Options": own, "Common": [keys[key] for key in common]}
        for key, title in section_of().items():
            if key in keys and key not in common:
                sections.setdefault(title, []).append(keys[key])
        for title, params in sections.items():
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Key(click.Option):
    """A configuration key as a flag."""


def _options(listed: frozenset[str]) -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for key, info in Config.model_fields.items():
        option = _option(key, info.annotation, info.default, info.description or "")
        option.hidden = key not in listed
        options.append(option)
    return options


def _option(key: str, annotation: Any, default: Any, text: str) -> _Key:
    dashed = key.replace("_", "-")
    if annotation is bool:
        text = f"{text}  [{'on' if default else 'off'}]"
        return _Key([f"--{dashed}/--no-{dashed}", key], default=None, help=text)
    kind: Any = click.Choice(list(get_args(annotation))) if get_origin(annotation) is Literal else annotation
    shown = "" if default == "" and "empty" in text else f"  [{'none' if default == '' else default}]"
    return _Key([f"--{dashed}", key], type=kind, default=None, help=text + shown)


def configured(listed: frozenset[str]) -> Callable[[_F], _F]:
    """Give a click command every configuration flag and --config; it is called with `config`, loaded and valid.
    listed: the keys its help shows."""
    return functools.partial(_configured, listed)


def _configured(listed: frozenset[str], function: _F) -> _F:
    @click.pass_context
    @functools.wraps(function)
    def run(context: click.Context, /, config_file: str | None, **given: Any) -> Any:
        flags = {key: given.pop(key) for key in Config.model_fields}
        return context.invoke(function, config=Config.load(flags, config_file), **given)

    config_file = click.Option(
        ["--config", "config_file"], type=click.Path(dir_okay=False), help="YAML file with the same keys"
    )
    own: list[click.Parameter] = list(getattr(function, "__click_params__", []))
    run.__click_params__ = [*_options(listed)[::-1], config_file, *own]  # type: ignore[attr-defined]  # click reverses it
    return run  # type: ignore[return-value]

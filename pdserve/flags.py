"""Command-line flags made from the configuration: one per key, same name with dashes. The command line adds none of
its own to what can be configured, so a flag, a variable and a line of the YAML file always say the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin, overload

import click

from runtime.config import Config

_F = TypeVar("_F", bound=Callable[..., Any])

SECTIONS = {
    "model": "The model",
    "role": "One worker",
    "host_pool_bytes": "Host tier",
    "sim": "Simulated workers",
    "lease_s": "Hand-off",
    "http_listen": "The router",
    "registry": "Registry and control",
    "elastic": "Elastic roles",
    "tls_cert": "TLS for our own sockets: all three or none",
    "prefill": "The cluster",
}
"""The first key of each section of the help."""

CLIENT_KEYS = frozenset({"registry_token", "tls_cert", "tls_key", "tls_ca", "address", "fleet", "state_dir"})
"""What a command that only talks to a cluster looks at; it takes the other keys without listing them."""


class Command(click.Command):
    """Lists its own options first, then the configuration by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = param.section if isinstance(param, _Key) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _Key(click.Option):
    """A configuration key as a flag."""

    section = ""


def _options(listed: frozenset[str] | None) -> list[click.Parameter]:
    options: list[click.Parameter] = []
    section = ""
    for key, info in Config.model_fields.items():
        section = SECTIONS.get(key, section)
        option = _option(key, info.annotation, info.default, info.description or "")
        option.section = section
        option.hidden = listed is not None and key not in listed
        options.append(option)
    return options


def _option(key: str, annotation: Any, default: Any, text: str) -> _Key:
    dashed = key.replace("_", "-")
    if annotation is bool:
        text = f"{text}  [{'on' if default else 'off'}]"
        return _Key([f"--{dashed}/--no-{dashed}", key], default=None, help=text)
    kind: Any = click.Choice(list(get_args(annotation))) if get_origin(annotation) is Literal else annotation
    return _Key([f"--{dashed}", key], type=kind, default=None, help=text if default == "" else f"{text}  [{default}]")


@overload
def configured(function: _F) -> _F: ...


@overload
def configured(*, listed: frozenset[str]) -> Callable[[_F], _F]: ...


def configured(function: _F | None = None, *, listed: frozenset[str] | None = None) -> Any:
    """Give a click command every configuration flag and --config; it is called with `config`, loaded and valid.
    listed: the keys its help shows (default: all)."""
    if function is None:
        return functools.partial(_configured, listed)
    return _configured(listed, function)


def _configured(listed: frozenset[str] | None, function: _F) -> _F:
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

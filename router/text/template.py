"""Chat templates in a sandbox, with what Hugging Face gives them.

A template comes with the model and is not trusted: it runs in jinja2's immutable sandbox, its loops and its output are
bounded, and whatever it raises becomes a 400 with the template's own message. Clients choose neither template nor
variables.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 32 << 20
MAX_RANGE = 100_000
MAX_MESSAGE_CHARS = 300


class ChatTemplate:
    """A compiled template. render() raises InvalidRequest(reason="template_error")."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest("the model's chat template is too large", field="model")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as exc:
            raise InvalidRequest("the model's chat template cannot be compiled", field="model") from exc
        # jinja2 looks its chained globals up name by name for every rendering; they never change here.
        self._template.globals = dict(self._template.globals)
        self._variables = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            ):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _failed("the rendered prompt is too large")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as exc:
            raise _failed(exc.message or "the chat template refused these messages") from exc
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as exc:
            # Python's own complaints about a template's expressions: their text may quote the input, so it is not used.
            raise _failed(f"the chat template failed ({type(exc).__name__})") from exc
        except MemoryError as exc:
            raise _failed("the chat template needs too much memory") from exc
        return "".join(pieces)


def _failed(message: str) -> InvalidRequest:
    return InvalidRequest(message[:MAX_MESSAGE_CHARS], reason="template_error", field="messages")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds what an expression may build: jinja2 bounds range() only, not repetition or powers."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateRuntimeError("powers are not allowed in a chat template")
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            count = right if isinstance(right, int) else left
            body = left if isinstance(right, int) else right
            if isinstance(count, int) and hasattr(body, "__len__") and count * len(body) > MAX_RANGE:
                raise jinja2.TemplateRuntimeError("a repetition in the chat template is too long")
        if operator == "%" and isinstance(left, str):
            _check_widths(left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in PADDING:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_widths(value.__self__, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return bounded


PADDING = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "zfill"})
_WIDE = re.compile("[0-9]{4}")


def _check_widths(form: str, *values: Any) -> None:
    """A width of four digits, written out or handed in, builds a text of any size from a few characters."""
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    if _WIDE.search(form) or (("*" in form or "{" in form) and any(isinstance(v, int) and v >= 1000 for v in flat)):
        raise jinja2.TemplateRuntimeError("a width in the chat template is too large")


class _Generation(Extension):
    """Hugging Face's {% generation %} block, which marks what a model trained on; to us it is its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False)
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    env.globals.pop("lipsum", None)
    for name in ("center", "format", "indent", "wordwrap"):
        env.filters.pop(name, None)
    env.filters["indent"] = _indent
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter: jinja2's own escapes HTML, which no model was trained on."""
    if isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("a field the chat template needs is missing")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    return do_indent(text, min(int(width), 64), first, blank)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message)[:MAX_MESSAGE_CHARS])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(str(form)[:MAX_MESSAGE_CHARS])

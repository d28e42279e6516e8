"""Text and tokens of the served model: rendering, encoding off the event loop, decoding.

Special tokens written out in a client's text are plain text here (a client cannot close its own turn). A template's own
special tokens are special. Both stand in one rendered prompt, so a message that spells one is rendered with a marker in
its place and the pieces between special tokens are encoded by themselves; all other prompts are encoded whole, which is
exactly what Hugging Face's apply_chat_template(tokenize=True) gives.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tokenizers import Tokenizer

from router.params import Limits, too_long
from router.text.detok import BROKEN
from router.text.template import ChatTemplate
from runtime.errors import InvalidRequest, Unsupported
from runtime.modelfiles import ModelFiles
from runtime.values import value

INLINE_CHARS = 2048
"""Shorter texts are encoded on the event loop (~50 us); longer ones in a thread."""

T = TypeVar("T")
Message = dict[str, str]


@value
class Rendered:
    text: str
    tokens: list[int]


@value
class Beginning:
    """What the template itself says before the first message, up to its last special token, and the ids of that."""

    text: str
    last: str
    tokens: list[int]


class Codec:
    """Everything about text that the router knows. Thread-safe after construction."""

    def __init__(self, files: ModelFiles, limits: Limits, pool: ThreadPoolExecutor) -> None:
        self._files = files
        self._tokenizer: Tokenizer = files.tokenizer()
        self.eos = files.eos_token_ids
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self._limits = limits
        self.context = limits.context
        self._pool = pool
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: ident for ident, token in added.items() if token.special and token.content}
        self._special = special
        self._special_pattern = _alternatives(special)
        self._special_ids = frozenset(special.values())
        literal = {token.content: ident for ident, token in added.items() if token.special and not token.normalized}
        self._beginning = self._constant_beginning(_alternatives(literal))
        self._pieces: dict[int, tuple[str, bytes]] = {}
        self._longest = max((len(text) for text in self._tokenizer.get_vocab()), default=1)

    async def encode(self, text: str, *, add_special: bool, field: str) -> list[int]:
        """A client's text; nothing in it is special. Raises InvalidRequest when it cannot fit the context."""
        self._refuse_hopeless(len(text), field)
        return await self._run(len(text), partial(self._encode_plain, text, add_special))

    async def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Rendered:
        """Raises InvalidRequest with the template's message, Unsupported for a model without a template."""
        if self._template is None:
            raise Unsupported("this model has no chat template", field="messages")
        size = sum(len(value) for message in messages for value in message.values())
        self._refuse_hopeless(size, "messages")
        return await self._run(size, partial(self._chat, self._template, messages, add_generation_prompt))

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special))

    async def decode_long(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        return await self._run(4 * len(tokens), partial(self._decode_apart, tokens, skip_special))

    def _decode_apart(self, tokens: Sequence[int], skip_special: bool) -> str:
        """A batch of one: unlike decode(), it lets other threads run."""
        return str(self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special)[0])

    def decoder(self, *, skip_special: bool) -> Callable[[Sequence[int]], str]:
        return partial(self._tokenizer.decode, skip_special_tokens=skip_special)

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token by itself: its text (with U+FFFD where it is part of a character) and its bytes."""
        found = self._pieces.get(token)
        if found is None:
            found = self._piece(token)
            self._pieces[token] = found
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def _piece(self, token: int) -> tuple[str, bytes]:
        text = self.decode([token], skip_special=False)
        if BROKEN not in text:
            return text, text.encode()
        name = self._tokenizer.id_to_token(token) or ""
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):
            return text, bytes([int(name[3:5], 16)])
        if name and all(char in _BYTE_OF for char in name):
            return text, bytes(_BYTE_OF[char] for char in name)
        return text, text.encode()

    def _refuse_hopeless(self, chars: int, field: str) -> None:
        """A text that is too long even if every token were the longest one is not worth tokenizing."""
        if chars > self._longest * self._limits.max_prompt_tokens + INLINE_CHARS:
            raise too_long(self._limits, field)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode_plain(self, text: str, add_special: bool) -> list[int]:
        return self._files.encode(text, allow_special=False, add_special_tokens=add_special)

    def _chat(self, template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool) -> Rendered:
        pattern = self._special_pattern
        if pattern is None or not any(pattern.search(value) for m in messages for value in m.values()):
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            return Rendered(text, self._encode_rendered(text))
        return self._chat_marked(template, messages, add_generation_prompt, pattern)

    def _constant_beginning(self, literal: re.Pattern[str] | None) -> Beginning | None:
        """literal: the special tokens that are found in a text as it is, before anything else is done with it."""
        if self._template is None or literal is None:
            return None
        probes = [[{"role": "user", "content": content}] for content in "ab"]
        try:
            one, other = (self._template.render(probe, add_generation_prompt=True) for probe in probes)
        except InvalidRequest:
            return None  # a template that wants more than one message of the user's
        common = next((at for at, chars in enumerate(zip(one, other, strict=False)) if len(set(chars)) > 1), 0)
        ends = list(literal.finditer(one, 0, common))
        text = one[: ends[-1].end()] if ends else ""
        return Beginning(text, ends[-1].group(), self._files.encode(text, allow_special=True)) if text else None

    def _encode_rendered(self, text: str) -> list[int]:
        """All of a prompt. A third of a short one is what the template begins with: its ids are known. What follows is
        encoded behind the special token it follows: where that is found again, nothing before it has a say."""
        known = self._beginning
        if known is not None and text.startswith(known.text):
            rest = self._files.encode(known.last + text[len(known.text) :], allow_special=True)
            if rest[:1] == known.tokens[-1:]:
                return known.tokens + rest[1:]
        return self._files.encode(text, allow_special=True)

    def _chat_marked(
        self, template: ChatTemplate, messages: Sequence[Message], generation: bool, pattern: re.Pattern[str]
    ) -> Rendered:
        """Messages that spell special tokens: each spelling becomes a marker no client can guess."""
        key = secrets.token_hex(8)
        spelled: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spelled.append(match.group())
            return f"x{key}x{len(spelled) - 1}x"

        marked = [{name: pattern.sub(mark, value) for name, value in message.items()} for message in messages]
        text = template.render(marked, add_generation_prompt=generation)
        markers = re.compile(f"x{key}x([0-9]+)x")

        def unmark(part: str) -> str:
            return markers.sub(lambda match: spelled[int(match.group(1))], part)

        tokens: list[int] = []
        at = 0
        for match in pattern.finditer(text):
            tokens += self._encode_part(unmark(text[at : match.start()]))
            tokens.append(self._special[match.group()])
            at = match.end()
        tokens += self._encode_part(unmark(text[at:]))
        return Rendered(unmark(text), tokens)

    def _encode_part(self, part: str) -> list[int]:
        return self._encode_plain(part, False) if part else []


def _alternatives(special: dict[str, int]) -> re.Pattern[str] | None:
    if not special:
        return None
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first))


def _byte_table() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes (GPT-2's table), inverted."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in visible}
    hidden = [value for value in range(256) if value not in visible]
    table.update({chr(256 + index): value for index, value in enumerate(hidden)})
    return table


_BYTE_OF = _byte_table()


def plain_content(content: Any) -> str:
    """A message's content as text: a string, or text parts joined by line ends. Raises Unsupported for other parts."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequest("a content part must be an object with a type", field="messages.content")
        if part["type"] != "text":
            raise Unsupported("only text content is supported", field="messages.content")
        if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise InvalidRequest("a text part holds `type` and `text`", field="messages.content")
        parts.append(part["text"])
    return "\n".join(parts)

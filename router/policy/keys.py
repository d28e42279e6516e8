"""The names of a prompt's prefix, made no faster than they are needed.

Hashing every page of a long prompt costs more than finding it. A link (256 tokens) is one hash over one kilobyte, and
presence is prefix-closed, so links alone say where to look closer; page keys are made for one link at a time, lazily.
The values are those of `kvtransfer.hashing`, bit for bit.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvtransfer.hashing import LINK_PAGES, LINK_TOKENS, page_keys
from kvtransfer.types import PAGE_TOKENS

_PAGE_BYTES = 4 * PAGE_TOKENS
_LINK_BYTES = 4 * LINK_TOKENS
_LITTLE_4 = array("I").itemsize == 4 and struct.pack("=I", 1) == struct.pack("<I", 1)


class Keys(Protocol):
    """What the index needs of a prompt: `links()` in order, and the unit keys inside link i, full units only.

    The last key of a full link is the link itself. unit_tokens: tokens per unit. tokens: length of the prompt.
    """

    @property
    def unit_tokens(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def links(self) -> Sequence[bytes]: ...

    def units(self, link: int) -> Sequence[bytes]: ...


class PromptKeys:
    """Keys of a prompt under a root. unit_extras as in `kvtransfer.hashing`: such prompts are hashed page by page."""

    unit_tokens = PAGE_TOKENS

    def __init__(self, root: bytes, tokens: Sequence[int], unit_extras: Iterable[tuple[int, bytes]] = ()) -> None:
        self.tokens = len(tokens)
        self._root = root
        extras = tuple(unit_extras)
        self._all = page_keys(root, tokens, extras) if extras else None
        self._data = b"" if extras else _packed(tokens)
        self._links = self._all[LINK_PAGES - 1 :: LINK_PAGES] if self._all is not None else self._chain()
        self._units: dict[int, list[bytes]] = {}

    def links(self) -> Sequence[bytes]:
        return self._links

    def units(self, link: int) -> Sequence[bytes]:
        """Keys of the full pages of link `link`, at most 16."""
        if self._all is not None:
            return self._all[link * LINK_PAGES : (link + 1) * LINK_PAGES]
        known = self._units.get(link)
        if known is None:
            known = self._units[link] = self._pages(link)
        return known

    def _chain(self) -> list[bytes]:
        links: list[bytes] = []
        previous = self._root
        for start in range(0, len(self._data) - _LINK_BYTES + 1, _LINK_BYTES):
            previous = hashlib.sha256(previous + self._data[start : start + _LINK_BYTES]).digest()
            links.append(previous)
        return links

    def _pages(self, link: int) -> list[bytes]:
        hasher = hashlib.sha256(self._links[link - 1] if link else self._root)
        start = link * _LINK_BYTES
        stop = min(start + _LINK_BYTES, len(self._data) // _PAGE_BYTES * _PAGE_BYTES)
        keys: list[bytes] = []
        for at in range(start, stop, _PAGE_BYTES):
            hasher.update(self._data[at : at + _PAGE_BYTES])
            keys.append(hasher.digest())
        return keys


def _packed(tokens: Sequence[int]) -> bytes:
    """Each token an unsigned 32-bit little-endian integer."""
    if _LITTLE_4:
        return array("I", tokens).tobytes()
    return struct.pack(f"<{len(tokens)}I", *tokens)

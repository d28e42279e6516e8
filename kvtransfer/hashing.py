"""Page keys: the names under which router, prefill and decode workers know the KV of a prefix.

A SHA-256 chain of 256-token links. Key k (1..16) of a link = SHA-256(previous link || the link's first 16*k tokens),
each token an unsigned 32-bit little-endian integer; key 16 is the next link. One incremental hasher makes all sixteen.
The first link hangs on the root: tagged, length-prefixed fields, so that no two owners can share a name by moving
bytes from one field to the next. Python's own hash() appears nowhere: it differs between processes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from kvtransfer.types import PAGE_TOKENS

HASH_VERSION = 1
LINK_TOKENS = 256
LINK_PAGES = LINK_TOKENS // PAGE_TOKENS

# No token can have this value, so an item's record can never be read as tokens (vocabularies end far below).
_ITEM_MARK = 0xFFFFFFFF
_UNIT = struct.Struct(f"<{PAGE_TOKENS}I")


def root(salt: bytes, model: str, revision: str, adapter_id: str = "", adapter_version: str = "") -> bytes:
    """The 32 bytes every key of this owner, model and adapter hangs on.

    salt: effective salt, set by the router from the authenticated tenant. revision: weights revision.
    """
    fields = (
        HASH_VERSION.to_bytes(4, "little"),
        salt,
        model.encode(),
        revision.encode(),
        adapter_id.encode(),
        adapter_version.encode(),
    )
    digest = hashlib.sha256(b"pdserve-root\0")
    for tag, value in enumerate(fields, start=1):
        digest.update(struct.pack("<BI", tag, len(value)))
        digest.update(value)
    return digest.digest()


class PageHasher:
    """Keys of one growing token sequence; what is hashed once is not hashed again.

    unit_extras: (position, content hash) of multimodal items; each is mixed into the key of the page holding its
    position, and so into all later ones.
    """

    def __init__(self, root: bytes, unit_extras: Iterable[tuple[int, bytes]] = ()) -> None:
        self._keys: list[bytes] = []
        self._link = hashlib.sha256(root)
        self._last_unit = b""
        self._extras: dict[int, list[tuple[int, bytes]]] = {}
        for position, content in sorted(unit_extras):
            self._extras.setdefault(position // PAGE_TOKENS, []).append((position, content))

    def page_keys(self, tokens: Sequence[int]) -> list[bytes]:
        """One key for every full page of `tokens`, which must begin with the tokens of earlier calls."""
        full = len(tokens) // PAGE_TOKENS
        done = len(self._keys)
        if 0 < done <= full:
            end = done * PAGE_TOKENS
            assert self._last_unit == _UNIT.pack(*tokens[end - PAGE_TOKENS : end]), "another sequence's hasher"
        for index in range(done, full):
            self._append(index, tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
        return self._keys[:full]

    def fork(self) -> PageHasher:
        """A hasher that has hashed the same tokens and goes its own way from here."""
        other = PageHasher(b"")
        other._keys = list(self._keys)
        other._link = self._link.copy()
        other._last_unit = self._last_unit
        other._extras = self._extras
        return other

    def links(self, tokens: Sequence[int]) -> list[bytes]:
        """The links: every sixteenth page key."""
        return self.page_keys(tokens)[LINK_PAGES - 1 :: LINK_PAGES]

    def _append(self, index: int, unit: Sequence[int]) -> None:
        packed = _UNIT.pack(*unit)
        self._link.update(packed)
        for position, content in self._extras.get(index, ()):
            self._link.update(struct.pack("<III", _ITEM_MARK, position, len(content)) + content)
        key = self._link.digest()
        self._keys.append(key)
        self._last_unit = packed
        if len(self._keys) % LINK_PAGES == 0:
            self._link = hashlib.sha256(key)


def page_keys(root: bytes, tokens: Sequence[int], unit_extras: Iterable[tuple[int, bytes]] = ()) -> list[bytes]:
    """Keys of every full page of `tokens`, in one go."""
    return PageHasher(root, unit_extras).page_keys(tokens)

"""Value types that are made often.

A frozen dataclass sets every field through object.__setattr__, four times the cost of a plain one; a short request
makes a hundred such fields at the router. `value` is a dataclass that type checkers take for frozen and Python does
not guard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """Like @dataclass(frozen=True, slots=True): never assign to a field."""
    return dataclass(slots=True, unsafe_hash=True)(kind)

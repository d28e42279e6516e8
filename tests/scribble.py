"""Random messages of any type: fields that are missing, at their bounds, of enums that do not exist, or nonsense."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_SIGNED = {Field.CPPTYPE_INT32: 31, Field.CPPTYPE_INT64: 63}
_UNSIGNED = {Field.CPPTYPE_UINT32: 32, Field.CPPTYPE_UINT64: 64}
_DEPTH = 4


def scribbled(kind: type[Message], chance: random.Random, **given: Any) -> Any:
    """A message with about half its fields set. given: what is not left to chance."""
    message = kind()
    fill(message, chance)
    for name, value in given.items():
        message.ClearField(name)
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def fill(message: Message, chance: random.Random, depth: int = _DEPTH) -> None:
    """Set about half of its fields."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.5 or (field.cpp_type == Field.CPPTYPE_MESSAGE and not depth):
            continue
        if field.is_repeated:
            _fill_many(getattr(message, field.name), field, chance, depth)
        elif field.cpp_type == Field.CPPTYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), chance, depth - 1)
        else:
            setattr(message, field.name, _value(field, chance))


def _fill_many(values: Any, field: Any, chance: random.Random, depth: int) -> None:
    entry = field.message_type
    for _ in range(chance.choice((1, 1, 2, 5))):
        if entry is not None and entry.GetOptions().map_entry:
            value = entry.fields_by_name["value"]
            key = _value(entry.fields_by_name["key"], chance)
            if value.cpp_type == Field.CPPTYPE_MESSAGE:
                fill(values[key], chance, depth - 1)
            else:
                values[key] = _value(value, chance)
        elif entry is not None:
            fill(values.add(), chance, depth - 1)
        else:
            values.append(_value(field, chance))


def _value(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _SIGNED:
        bits = _SIGNED[kind]
        return chance.choice((0, 1, -1, 7, 2**bits - 1, -(2**bits)))
    if kind in _UNSIGNED:
        return chance.choice((0, 1, 2, 16, 300, 2 ** _UNSIGNED[kind] - 1))
    if kind == Field.CPPTYPE_ENUM:
        return chance.choice((*(value.number for value in field.enum_type.values), 99))
    if kind == Field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return chance.choice((0.0, 1.0, -1.0, 1e-30, 1e38, float("nan"), float("inf"), -float("inf")))
    if field.type == Field.TYPE_BYTES:
        return chance.choice((b"", b"\0" * 32, b"x", chance.randbytes(40)))
    return chance.choice(("", "a", "../..", "127.0.0.1:1", "nowhere", "x" * 300, "\0", "é"))

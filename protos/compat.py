"""Whether one version of the contract may follow another: old and new processes talk to each other during an upgrade.

Compared are descriptor sets, so comments and layout do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)


def problems(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """What breaks peers of the old version, one sentence each; empty when nothing does.

    A message, enum value, service or method that went away; a field whose number, name, type, label or oneof changed;
    a removed number that is not reserved; a reserved number that came back; an enum without an UNSPECIFIED zero.
    """
    found = unspecified_problems(new)
    old_messages, new_messages = dict(_messages(old)), dict(_messages(new))
    for name, message in old_messages.items():
        if name in new_messages:
            found += _message_problems(name, message, new_messages[name])
        else:
            found.append(f"message {name} was removed")
    old_enums, new_enums = dict(_enums(old)), dict(_enums(new))
    for name, enum in old_enums.items():
        if name in new_enums:
            found += _enum_problems(name, enum, new_enums[name])
        else:
            found.append(f"enum {name} was removed")
    return found + _service_problems(old, new)


def unspecified_problems(files: FileDescriptorSet) -> list[str]:
    """Every enum's zero must be UNSPECIFIED, so that a field nobody set is told from one that was."""
    return [
        f"enum {name} has no ..._UNSPECIFIED = 0"
        for name, enum in _enums(files)
        if not any(value.number == 0 and value.name.endswith("UNSPECIFIED") for value in enum.value)
    ]


def _message_problems(name: str, old: DescriptorProto, new: DescriptorProto) -> list[str]:
    found = []
    now = {field.number: field for field in new.field}
    reserved = _reserved(new)
    for field in old.field:
        if field.number not in now:
            if field.number not in reserved:
                found.append(f"{name}.{field.name} was removed and {field.number} is not reserved")
        elif _shape(field, old) != _shape(now[field.number], new):
            found.append(f"{name}.{field.name} = {field.number} changed its name, type, label or oneof")
    found += [f"{name} uses or frees the reserved number {n}" for n in sorted(_reserved(old) - reserved)]
    return found


def _enum_problems(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> list[str]:
    found = []
    now = {value.number: value.name for value in new.value}
    reserved = _reserved(new)
    for value in old.value:
        if value.number not in now:
            if value.number not in reserved:
                found.append(f"{name}.{value.name} was removed and {value.number} is not reserved")
        elif now[value.number] != value.name:
            found.append(f"{name}.{value.name} = {value.number} is now {now[value.number]}")
    found += [f"{name} uses or frees the reserved number {n}" for n in sorted(_reserved(old) - reserved)]
    return found


def _service_problems(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    now = dict(_methods(new))
    found = []
    for name, method in _methods(old):
        if name not in now:
            found.append(f"method {name} was removed")
        elif _signature(method) != _signature(now[name]):
            found.append(f"method {name} changed its messages or streaming")
    return found


def _shape(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[object, ...]:
    in_oneof = field.HasField("oneof_index")
    oneof = message.oneof_decl[field.oneof_index].name if in_oneof else ""
    return (field.name, field.type, field.type_name, field.label, field.proto3_optional, oneof)


def _signature(method: MethodDescriptorProto) -> tuple[object, ...]:
    return (method.input_type, method.output_type, method.client_streaming, method.server_streaming)


def _reserved(item: DescriptorProto | EnumDescriptorProto) -> set[int]:
    """Message ranges end before `end`, enum ranges include it (descriptor.proto)."""
    last = 1 if isinstance(item, EnumDescriptorProto) else 0
    return {number for reserved in item.reserved_range for number in range(reserved.start, reserved.end + last)}


def _messages(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    for file in files.file:
        for message in file.message_type:
            yield from _nested(f"{file.package}.{message.name}", message)


def _nested(name: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, message
    for inner in message.nested_type:
        yield from _nested(f"{name}.{inner.name}", inner)


def _enums(files: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for file in files.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in _messages(files):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _methods(files: FileDescriptorSet) -> Iterator[tuple[str, MethodDescriptorProto]]:
    for file in files.file:
        yield from _file_methods(file)


def _file_methods(file: FileDescriptorProto) -> Iterator[tuple[str, MethodDescriptorProto]]:
    for service in file.service:
        for method in service.method:
            yield f"{file.package}.{service.name}/{method.name}", method

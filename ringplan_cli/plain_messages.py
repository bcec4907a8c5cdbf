"""Protobuf messages as plain values, for JSON: every field under its own name, numbers as numbers, enums as words."""

from typing import Any

from google.protobuf.message import Message


def build_plain(message: Message) -> dict[str, Any]:
    """Returns a message's fields by name; fields that are not set have their default.

    Args:
        message: one without maps and bytes.
    """
    return {field.name: _build_value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def name_value(enum: Any, number: int) -> str:
    """Returns an enum's value in one small word: `CACHE_MODE_ON` is `on`.

    Args:
        enum: the enum's descriptor; its value 0 ends in `UNSPECIFIED`.
        number: the value; one that this version does not know stays a number.
    """
    value = enum.values_by_number.get(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(number) if value is None else value.name.removeprefix(prefix).lower()


def _build_value(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_build_single(field, item) for item in value]
    return _build_single(field, value)


def _build_single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return build_plain(value)
    return value if field.enum_type is None else name_value(field.enum_type, value)

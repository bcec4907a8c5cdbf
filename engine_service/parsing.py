"""Reads protobuf messages, and names the field at fault where one cannot be read."""

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from engine_service.errors import InvalidRequestError

_LENGTH_DELIMITED = 2

MessageT = TypeVar("MessageT", bound=Message)


def parse(message_type: type[MessageT], data: bytes) -> MessageT:
    """Reads a message.

    Args:
        message_type: which.
        data: its bytes.

    Raises:
        InvalidRequestError: the bytes are no such message, or a text in it is not valid UTF-8.
    """
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        field = _find_invalid_text(data, message_type.DESCRIPTOR)
        if field is None:
            raise InvalidRequestError("request", f"the bytes are no {message_type.DESCRIPTOR.full_name}") from error
        raise InvalidRequestError(field, "must be valid UTF-8") from error
    return message


def _find_invalid_text(data: bytes, descriptor: Any) -> str | None:
    """Returns the path of the first text field that is not UTF-8, or None; protobuf itself names none."""
    try:
        # Everything is unknown to an empty message, so it keeps all fields as they came.
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    for entry in fields:  # type: ignore[attr-defined]  # The stub lacks __iter__.
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                entry.data.decode()
            except UnicodeDecodeError:
                return str(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = _find_invalid_text(entry.data, field.message_type)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None

"""How calls are answered, whatever the API: errors become statuses, with reasons for programs."""

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest

from engine_service import errors
from engine_service.calls import INTERNAL_REASON, MAX_BYTES_READ_AT_ONCE, build_request_id, find_status, read_message
from engine_service.errors import EngineError


def _list_error_classes(base: type[EngineError] = EngineError) -> Iterator[type[EngineError]]:
    for error_class in base.__subclasses__():
        yield error_class
        yield from _list_error_classes(error_class)


@pytest.mark.parametrize("error_class", list(_list_error_classes()), ids=lambda error_class: error_class.__name__)
def test_every_error_has_a_status_and_a_reason(error_class: type[EngineError]) -> None:
    """No error of the engine reaches a caller as UNKNOWN."""
    code, reason = find_status(error_class.__new__(error_class))
    assert code not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK}
    assert reason == reason.upper()
    assert reason != INTERNAL_REASON, "the class or one of its bases is listed"
    assert error_class.__doc__ is not None
    assert error_class.__doc__.startswith(("Raised when ", "Base of "))
    assert error_class.__module__ == errors.__name__


@pytest.mark.parametrize("num_more_bytes", [0, 1])
def test_large_messages_are_read_in_another_thread(num_more_bytes: int) -> None:
    """Those that take longer than a moment must not hold up the other calls."""
    data = b"x" * (MAX_BYTES_READ_AT_ONCE + num_more_bytes)
    reader = asyncio.run(read_message(lambda _data: threading.get_ident(), data))
    assert (reader == threading.get_ident()) == (num_more_bytes == 0)


def test_made_up_names_differ() -> None:
    """Two requests without a name can be told apart in the log."""
    assert len({build_request_id() for _ in range(100)}) == 100

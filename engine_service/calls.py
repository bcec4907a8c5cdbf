"""How calls are answered: messages read, answers written as they come, errors as status codes, in this one place."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, Protocol, TypeVar
from uuid import uuid4

import grpc

from engine_service.engine import Engine
from engine_service.errors import (
    CopyTimeoutError,
    EngineError,
    EngineStoppingError,
    InvalidRequestError,
    ListenError,
    MissingPackageError,
    ModelError,
    QueueFullError,
    RequestTooLargeError,
    StepFailedError,
)
from engine_service.request import (
    GeneratedDelta,
    GenerationEnded,
    GenerationEvent,
    GenerationFailed,
    PromptComputed,
    Request,
)

# The trailing metadata that says why a call failed, in words that a program can rely on.
REASON_KEY = "ringplan-reason"
FIELD_KEY = "ringplan-field"
INTERNAL_REASON = "INTERNAL"
# A status message travels in headers, most of which are limited to 8 KiB, with three bytes for one that is not ASCII.
MAX_DETAILS_BYTES = 2_000
# Messages up to here are read in the event loop, in milliseconds.
MAX_BYTES_READ_AT_ONCE = 1 << 16

_Status = grpc.StatusCode
# A class that is not listed is treated as its nearest base that is.
STATUS_BY_ERROR: dict[type[EngineError], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (_Status.INVALID_ARGUMENT, "INVALID_REQUEST"),
    RequestTooLargeError: (_Status.INVALID_ARGUMENT, "REQUEST_TOO_LARGE"),
    QueueFullError: (_Status.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    EngineStoppingError: (_Status.UNAVAILABLE, "SHUTTING_DOWN"),
    StepFailedError: (_Status.INTERNAL, "STEP_FAILED"),
    CopyTimeoutError: (_Status.INTERNAL, "COPY_TIMEOUT"),
    ListenError: (_Status.UNAVAILABLE, "CANNOT_LISTEN"),
    MissingPackageError: (_Status.FAILED_PRECONDITION, "MISSING_PACKAGE"),
    ModelError: (_Status.FAILED_PRECONDITION, "MODEL"),
    EngineError: (_Status.INTERNAL, INTERNAL_REASON),
}

ResultT = TypeVar("ResultT")
CallContext = grpc.aio.ServicerContext[bytes, bytes]
# Numbers of samples, and what happened to them.
SampleEvents = asyncio.Queue[tuple[int, GenerationEvent]]
_logger = logging.getLogger(__name__)


class AnswerMessages(Protocol):
    """Puts what happens to a request into messages of some API; None where there is nothing to send yet."""

    def build_prompt(self, computed: PromptComputed) -> bytes | None:
        """Tells of the prompt."""

    def build_delta(self, deltas: Sequence[GeneratedDelta], sample: int) -> bytes | None:
        """Tells of one or more deltas of a sample, in a row."""

    def build_final(self, ended: GenerationEnded, sample: int) -> bytes | None:
        """Tells how a sample ended."""


def find_status(error: EngineError) -> tuple[grpc.StatusCode, str]:
    """Returns the status code and the machine-readable reason of an error."""
    return next(STATUS_BY_ERROR[base] for base in type(error).__mro__ if base in STATUS_BY_ERROR)


def build_request_id() -> str:
    """Returns a name for a request that brings none."""
    return uuid4().hex[:16]


async def read_message(read: Callable[[bytes], ResultT], data: bytes) -> ResultT:
    """Reads a message; one with millions of parts must not hold up the other calls."""
    if len(data) <= MAX_BYTES_READ_AT_ONCE:
        return read(data)
    return await asyncio.to_thread(read, data)


async def write_answer(
    context: CallContext, engine: Engine, requests: Sequence[Request], events: SampleEvents, messages: AnswerMessages
) -> None:
    """Writes an answer as it comes; if that ends early, for whatever reason, the requests are aborted.

    Args:
        context: the call.
        engine: runs the requests.
        requests: a request for each sample.
        events: what happens to them.
        messages: puts it into messages.

    Raises:
        EngineError: a sample failed.
    """
    num_samples_left = len(requests)
    try:
        while num_samples_left:
            num_samples_left -= await _write_events(context, events, messages)
    finally:
        if num_samples_left:
            for request in requests:
                engine.abort(request)


async def _write_events(context: CallContext, events: SampleEvents, messages: AnswerMessages) -> int:
    """Waits for events and writes them, deltas of a sample in a row as one message.

    Returns:
        How many samples have ended.

    Raises:
        EngineError: a sample failed.
    """
    arrived = [await events.get()]
    while not events.empty():
        arrived.append(events.get_nowait())
    deltas: dict[int, list[GeneratedDelta]] = {}
    num_ended = 0
    for sample, event in arrived:
        if isinstance(event, PromptComputed):
            await _write(context, messages.build_prompt(event))
        elif isinstance(event, GeneratedDelta):
            deltas.setdefault(sample, []).append(event)
        else:
            if sample in deltas:
                await _write(context, messages.build_delta(deltas.pop(sample), sample))
            if isinstance(event, GenerationFailed):
                raise event.error
            await _write(context, messages.build_final(event, sample))
            num_ended += 1
    for sample, news in deltas.items():
        await _write(context, messages.build_delta(news, sample))
    return num_ended


async def _write(context: CallContext, message: bytes | None) -> None:
    if message is not None:
        await context.write(message)


async def answer_call(context: CallContext, answer: Awaitable[ResultT]) -> ResultT:
    """Awaits an answer; an error becomes the call's status."""
    try:
        return await answer
    except EngineError as error:
        await _abort(context, error)
    except Exception as error:
        _logger.exception("a call failed within the engine")
        metadata = ((REASON_KEY, INTERNAL_REASON),)
        details = _shorten(f"within the engine: {error!r}")
        await context.abort(grpc.StatusCode.INTERNAL, details, trailing_metadata=metadata)


async def _abort(context: CallContext, error: EngineError) -> NoReturn:
    code, reason = find_status(error)
    metadata = [(REASON_KEY, reason)]
    if isinstance(error, InvalidRequestError):
        metadata.append((FIELD_KEY, error.field))
    await context.abort(code, _shorten(str(error)), trailing_metadata=tuple(metadata))


def _shorten(details: str) -> str:
    return details.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")

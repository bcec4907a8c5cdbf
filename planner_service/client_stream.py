"""The gRPC stream of one session: an outbox towards the planner, and a thread that reads what comes back."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import grpc

from planner_service.client_errors import SessionLostError
from planner_service.errors import PlannerError, ProtocolError
from ringplan.planner.v1 import planner_pb2

CLOSE_TIMEOUT_SECONDS = 2.0
CANCEL_TIMEOUT_SECONDS = 1.0
REASON_KEY = "ringplan-reason"  # as `rpc.py` has it
PROTOCOL_REASONS = ("PROTOCOL_BROKEN", "MALFORMED_MESSAGE")
CLOSED_REASON = "closed by the engine"

_logger = logging.getLogger(__name__)


class PlanCall(Protocol):
    """A running Plan call: iterating gives the responses, and raises grpc.RpcError if the call fails."""

    def __iter__(self) -> Iterator[planner_pb2.PlanResponse]:
        """Returns the responses."""

    def cancel(self) -> object:
        """Ends the call at once."""


StartCall = Callable[[Iterator[planner_pb2.PlanRequest]], PlanCall]


class PlanStream:
    """Sends requests without waiting and hands responses to `on_response`, in the reader thread.

    Args:
        start_call: starts the Plan call.
        on_response: takes a response; what it raises ends the stream.
        on_end: called once, last, in the reader thread; `ending` is set by then.
    """

    def __init__(
        self,
        start_call: StartCall,
        on_response: Callable[[planner_pb2.PlanResponse], None],
        on_end: Callable[[], None],
    ) -> None:
        self._ending: SessionLostError | PlannerError | None = None
        self._on_response = on_response
        self._on_end = on_end
        self._is_closing = False
        self._outbox: queue.SimpleQueue[planner_pb2.PlanRequest | None] = queue.SimpleQueue()
        self._start_call = start_call
        self._call: PlanCall | None = None
        self._reader = threading.Thread(target=self._read, name="ringplan-reader", daemon=True)

    @property
    def ending(self) -> SessionLostError | PlannerError | None:
        """What ended the stream, or None while it runs; each time a new one, since a raised error keeps its raisers."""
        if isinstance(self._ending, SessionLostError):
            return SessionLostError(self._ending.reason, self._ending.status)
        return None if self._ending is None else type(self._ending)(*self._ending.args)

    def start(self, first: planner_pb2.PlanRequest) -> None:
        """Starts the call with its first request."""
        self._outbox.put(first)
        self._call = self._start_call(iter(self._outbox.get, None))
        self._reader.start()

    def send(self, request: planner_pb2.PlanRequest) -> None:
        """Queues a request; one that the stream's end overtakes is lost with it."""
        self._outbox.put(request)

    def check_alive(self) -> None:
        """Raises what ended the stream, if it has ended.

        Raises:
            SessionLostError: the stream has ended.
            ProtocolError: the planner ended it because a message broke the protocol.
        """
        if self._ending is not None:
            # Not by way of a variable: an error in a variable of the frame that raised it is a cycle.
            raise cast("Exception", self.ending)

    def close(self) -> None:
        """Ends the stream in peace, and by force where the planner does not answer. May be called again."""
        self._is_closing = True
        self._outbox.put(None)
        self._join(CLOSE_TIMEOUT_SECONDS)
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream by force, if it has not ended. May be called again."""
        self._is_closing = True
        call = self._call
        if self._reader.is_alive() and call is not None:
            call.cancel()
            self._join(CANCEL_TIMEOUT_SECONDS)

    def _join(self, timeout_seconds: float) -> None:
        if self._reader.is_alive():
            self._reader.join(timeout_seconds)

    def _read(self) -> None:
        call = self._call
        assert call is not None
        ending: SessionLostError | PlannerError = SessionLostError("the planner ended it", "OK")
        try:
            for response in call:
                self._on_response(response)
        except grpc.RpcError as error:
            # What a call raises is the call itself: with the traceback it would keep this frame, and that the session.
            ending = _translate_ending(error.with_traceback(None))
        except Exception as error:
            # Whatever it is, the engine must hear of it: a reader that dies in silence leaves it waiting for ever.
            _logger.exception("a response of the planner cannot be read")
            ending = SessionLostError(f"a response cannot be read: {error!r}")
            call.cancel()
        if self._is_closing:
            ending = SessionLostError(CLOSED_REASON)
        self._ending = ending
        self._outbox.put(None)  # gRPC's sending thread waits for the next request: this lets it go
        on_end = self._on_end
        # An ended stream lets go of its session: a cycle would keep mapped memory until Python happens to collect.
        self._on_end, self._on_response, self._call = _do_nothing, _ignore, None
        on_end()


def _do_nothing() -> None:
    """Takes the place of `on_end` once it has been called."""


def _ignore(_response: planner_pb2.PlanResponse) -> None:
    """Takes the place of `on_response` once the stream has ended."""


def _translate_ending(error: grpc.RpcError) -> SessionLostError | PlannerError:
    if not hasattr(error, "code"):
        return SessionLostError(repr(error))
    call = cast("grpc.Call", error)  # What a call raises is the call itself.
    details = call.details() or "no details"
    if _find_reason(call) in PROTOCOL_REASONS:
        return ProtocolError(details)
    return SessionLostError(details, call.code().name)


def _find_reason(call: grpc.Call) -> str:
    for key, value in call.trailing_metadata() or ():
        if key == REASON_KEY:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""

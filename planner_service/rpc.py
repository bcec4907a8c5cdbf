"""The planner over gRPC: the only module of it that handles calls, and that knows status codes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # The stubs lack it.

from planner_service.errors import (
    DrillRefusedError,
    InvalidLayoutError,
    InvalidOptionsError,
    MalformedMessageError,
    MetricsAddressError,
    OutOfPagesError,
    PlannerError,
    ProtocolError,
    RegionFolderError,
    RegionUnavailableError,
    RingTimeoutError,
    SessionLimitError,
    SessionNotNamedError,
    ShuttingDownError,
    SocketInUseError,
    SocketPathError,
    UnknownSessionError,
    UnknownStreamError,
)
from planner_service.messages import CacheMode, SessionReply
from planner_service.metrics import PlannerMetrics
from planner_service.session import Session
from planner_service.sessions import OpenSessions
from planner_service.wire import (
    NUMBER_BY_CACHE_MODE,
    build_dump,
    build_response,
    build_summary,
    parse,
    read_message,
    read_options,
)
from ringplan.planner.v1 import planner_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name
# The trailing metadata that says why a call failed, in a word that a program can rely on.
REASON_KEY = "ringplan-reason"
INTERNAL_REASON = "INTERNAL"

_Status = grpc.StatusCode
STATUS_BY_ERROR: dict[type[PlannerError], tuple[grpc.StatusCode, str]] = {
    OutOfPagesError: (_Status.RESOURCE_EXHAUSTED, "OUT_OF_PAGES"),
    InvalidLayoutError: (_Status.INVALID_ARGUMENT, "INVALID_LAYOUT"),
    UnknownStreamError: (_Status.INVALID_ARGUMENT, "UNKNOWN_STREAM"),
    RingTimeoutError: (_Status.DEADLINE_EXCEEDED, "RING_TIMEOUT"),
    RegionUnavailableError: (_Status.RESOURCE_EXHAUSTED, "REGION_UNAVAILABLE"),
    InvalidOptionsError: (_Status.INVALID_ARGUMENT, "INVALID_OPTIONS"),
    MalformedMessageError: (_Status.INVALID_ARGUMENT, "MALFORMED_MESSAGE"),
    ProtocolError: (_Status.FAILED_PRECONDITION, "PROTOCOL_BROKEN"),
    SessionLimitError: (_Status.RESOURCE_EXHAUSTED, "SESSION_LIMIT"),
    UnknownSessionError: (_Status.NOT_FOUND, "UNKNOWN_SESSION"),
    SessionNotNamedError: (_Status.FAILED_PRECONDITION, "SESSION_NOT_NAMED"),
    DrillRefusedError: (_Status.FAILED_PRECONDITION, "DRILL_REFUSED"),
    ShuttingDownError: (_Status.UNAVAILABLE, "SHUTTING_DOWN"),
    SocketInUseError: (_Status.UNAVAILABLE, "SOCKET_IN_USE"),
    SocketPathError: (_Status.UNAVAILABLE, "SOCKET_PATH"),
    RegionFolderError: (_Status.UNAVAILABLE, "REGION_FOLDER"),
    MetricsAddressError: (_Status.UNAVAILABLE, "METRICS_ADDRESS"),
}

ResultT = TypeVar("ResultT")
_Context = grpc.aio.ServicerContext[bytes, bytes]
_logger = logging.getLogger(__name__)


class PlannerServicer:
    """Serves `PlannerService`. Messages come and go as bytes, so that one that cannot be read gets a proper answer.

    Args:
        sessions: the open sessions.
        metrics: where broken protocols are counted, and captures written.
        default_ring_depth: of an engine that does not choose.
        default_cache_mode: of an engine that does not choose.
        version: the planner's, for engines to show.
        clock: the clock of the sessions' deadlines, in seconds.
        allows_drills: whether mismatches may be made on purpose.
    """

    def __init__(
        self,
        sessions: OpenSessions,
        metrics: PlannerMetrics,
        *,
        default_ring_depth: int,
        default_cache_mode: CacheMode,
        version: str,
        clock: Callable[[], float],
        allows_drills: bool = False,
    ) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._default_ring_depth = default_ring_depth
        self._default_cache_mode = default_cache_mode
        self._version = version
        self._clock = clock
        self._allows_drills = allows_drills
        self._calls: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def build_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns what a server needs to serve this."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Plan": grpc.stream_stream_rpc_method_handler(self.plan),
                "ListSessions": grpc.unary_unary_rpc_method_handler(self.list_sessions),
                "DumpSession": grpc.unary_unary_rpc_method_handler(self.dump_session),
                "DrillMismatch": grpc.unary_unary_rpc_method_handler(self.drill_mismatch),
            },
        )

    async def plan(self, _requests: object, context: _Context) -> None:
        """Opens a session and serves it until the call ends, however it ends."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self._all_ended.clear()
        try:
            await self._answer(context, self._serve_session(context))
        except asyncio.CancelledError:
            if task not in self._ending:
                raise
            # The planner cancelled it, not the engine: the engine is told why.
            task.uncancel()
            await _abort(context, ShuttingDownError())
        finally:
            self._calls.discard(task)
            self._ending.discard(task)
            if not self._calls:
                self._all_ended.set()

    async def list_sessions(self, request: bytes, context: _Context) -> bytes:
        """Lists the open sessions."""

        async def answer() -> bytes:
            parse(pb.ListSessionsRequest, request)
            summaries = [build_summary(summary) for summary in self._sessions.summarize()]
            return pb.ListSessionsResponse(sessions=summaries).SerializeToString()

        return await self._answer(context, answer())

    async def dump_session(self, request: bytes, context: _Context) -> bytes:
        """Shows everything one session holds."""

        async def answer() -> bytes:
            name = parse(pb.DumpSessionRequest, request).session
            return build_dump(self._sessions.get(name).dump()).SerializeToString()

        return await self._answer(context, answer())

    async def drill_mismatch(self, request: bytes, context: _Context) -> bytes:
        """Makes the cached plan that a session uses next wrong, for the verify mode to find."""

        async def answer() -> bytes:
            name = parse(pb.DrillMismatchRequest, request).session
            if not self._allows_drills:
                raise DrillRefusedError("this planner allows no drills: it was started without --allow-drills")
            session = self._sessions.get_named_or_only(name)
            session.drill_mismatch()
            _logger.warning("%s: a drill makes the cached plan that is used next wrong", session.name)
            captures = self._metrics.capture_folder
            capture_dir = str(captures.path) if captures.has_room(for_drill=True) else ""
            return pb.DrillMismatchResponse(session=session.name, capture_dir=capture_dir).SerializeToString()

        return await self._answer(context, answer())

    async def wait_until_idle(self) -> None:
        """Returns once no session is open."""
        await self._all_ended.wait()

    async def end_sessions(self) -> None:
        """Ends the sessions that are still open, and returns once they are."""
        self._ending |= self._calls
        for task in self._ending:
            task.cancel()
        await self._all_ended.wait()

    async def _serve_session(self, context: _Context) -> None:
        data = await context.read()
        if data is EOF:
            return
        request = parse(pb.PlanRequest, data)
        if not request.HasField("open"):
            raise ProtocolError("the first request must open a session")
        session = self._sessions.add(read_options(request.open, self._default_ring_depth, self._default_cache_mode))
        _logger.info("%s of %r is open: %s", session.name, session.options.engine_name, session.options)
        try:
            response = build_response(session.open())
            response.opened.CopyFrom(_build_opened(session, self._version))
            await _see_through(context.write(response.SerializeToString()))
            request.ClearField("open")
            async with asyncio.TaskGroup() as group:
                writer = _Writer(context)
                expiring = group.create_task(self._expire_waiting(session, writer))
                await self._handle_messages(session, request, context, writer)
                expiring.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self._sessions.remove(session)
            _logger.info("%s of %r is closed", session.name, session.options.engine_name)

    async def _handle_messages(
        self, session: Session, request: pb.PlanRequest, context: _Context, writer: "_Writer"
    ) -> None:
        """Handles one message after the other until the engine sends no more."""
        while True:
            await writer.write(session.handle(read_message(request), in_parts=True))
            while session.has_more:
                await writer.write(session.go_on())
            data = await context.read()
            if data is EOF:
                return
            request = parse(pb.PlanRequest, data)

    async def _expire_waiting(self, session: Session, writer: "_Writer") -> None:
        """Fails steps that wait too long for a buffer set.

        A task of its own that looks rarely, since a timer for every message would cost more than a plan. Deadlines are
        set a whole ring time-out ahead, so looking that often misses none.
        """
        while True:
            now = self._clock()
            due = now + self._sessions.ring_timeout_seconds if session.deadline is None else session.deadline
            if due > now:
                await asyncio.sleep(due - now)
            else:
                await writer.write(session.expire())

    async def _answer(self, context: _Context, answer: Awaitable[ResultT]) -> ResultT:
        """Awaits an answer; an error becomes the call's status."""
        try:
            return await answer
        except PlannerError as error:
            if isinstance(error, ProtocolError):
                self._metrics.protocol_errors.inc()
            _logger.warning("a call failed: %s", error)
            await _abort(context, error)
        except Exception as error:
            _logger.exception("a call failed within the planner")
            reason = ((REASON_KEY, INTERNAL_REASON),)
            await context.abort(grpc.StatusCode.INTERNAL, f"within the planner: {error!r}", trailing_metadata=reason)


async def _see_through(first_write: Coroutine[Any, Any, None]) -> None:
    """Awaits a call's first write to its end, also when the call is cancelled meanwhile.

    The write carries the call's metadata, and until it has ended gRPC refuses the status that says why the call ends.
    """
    write = asyncio.ensure_future(first_write)
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        await asyncio.wait((write,))
        raise


async def _abort(context: _Context, error: PlannerError) -> NoReturn:
    code, reason = STATUS_BY_ERROR[type(error)]
    await context.abort(code, str(error), trailing_metadata=((REASON_KEY, reason),))


class _Writer:
    """Sends replies in the order in which they were made, whichever task made them.

    Args:
        context: the call.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._turn = asyncio.Lock()  # gRPC takes one write at a time; the lock is given in order.

    async def write(self, reply: SessionReply) -> None:
        """Sends a reply, unless there is nothing in it."""
        if reply.regions or reply.results:
            async with self._turn:
                await self._context.write(build_response(reply).SerializeToString())


def _build_opened(session: Session, version: str) -> pb.SessionOpened:
    return pb.SessionOpened(
        session=session.name,
        planner_version=version,
        ring_depth=session.options.ring_depth,
        cache_mode=NUMBER_BY_CACHE_MODE[session.options.cache_mode],
    )

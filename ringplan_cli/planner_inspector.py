"""Asks a planner for its sessions, and for drills; failures become one clear line."""

from types import TracebackType

import grpc

from planner_service.unix_socket import build_target, find_fault
from ringplan.planner.v1 import planner_pb2, planner_pb2_grpc
from ringplan_cli.errors import CommandError

ANSWER_SECONDS = 10.0


class NotOfferedError(CommandError):
    """Raised when a planner lacks what is no part of planning itself: another implementation may leave it out."""


class PlannerInspector:
    """A connection to one planner, beside those of its engines: to look, and to try out what watches it.

    Args:
        socket: the planner's unix socket: "unix:/path" or a path.

    Raises:
        CommandError: no socket can be there.
    """

    def __init__(self, socket: str) -> None:
        self._target = socket if socket.startswith("unix:") else f"unix:{socket}"
        fault = find_fault(self._target)
        if fault is not None:
            raise CommandError(f"{self._target}: {fault}")
        # A dump of many streams with long contexts is larger than gRPC's own limit.
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(build_target(self._target), options=options)
        self._service = planner_pb2_grpc.PlannerServiceStub(self._channel)

    def __enter__(self) -> "PlannerInspector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def list_sessions(self) -> planner_pb2.ListSessionsResponse:
        """Returns the open sessions, oldest first.

        Raises:
            NotOfferedError: the planner has no such method.
            CommandError: there is no answer.
        """
        try:
            return self._service.ListSessions(planner_pb2.ListSessionsRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def dump_session(self, session: str) -> planner_pb2.DumpSessionResponse:
        """Returns everything one session holds.

        Args:
            session: its name.

        Raises:
            NotOfferedError: the planner has no such method.
            CommandError: there is no answer, or no session of this name.
        """
        _require_unicode(session)
        try:
            return self._service.DumpSession(planner_pb2.DumpSessionRequest(session=session), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def drill_mismatch(self, session: str) -> planner_pb2.DrillMismatchResponse:
        """Makes the cached plan that a session uses next wrong on purpose.

        Args:
            session: its name; empty for the only open one.

        Raises:
            NotOfferedError: the planner has no such method.
            CommandError: there is no answer, no such session, or the planner refuses.
        """
        _require_unicode(session)
        try:
            request = planner_pb2.DrillMismatchRequest(session=session)
            return self._service.DrillMismatch(request, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error, "makes no drills") from error

    def _translate(self, error: grpc.RpcError, lack: str = "shows no sessions") -> CommandError:
        status, details = error.code(), error.details() or "no reason given"
        if status is grpc.StatusCode.UNAVAILABLE:
            return CommandError(f"no planner answers at {self._target}")
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandError(f"the planner at {self._target} did not answer within {ANSWER_SECONDS:g} s")
        if status in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}:
            return CommandError(details)
        if status is grpc.StatusCode.UNIMPLEMENTED:
            return NotOfferedError(f"the planner at {self._target} {lack}: {details}")
        return CommandError(f"{self._target}: {details} ({status.name})")


def _require_unicode(session: str) -> None:
    """Refuses what the command line took from bytes that are no UTF-8: no message can carry it."""
    try:
        session.encode()
    except UnicodeEncodeError as error:
        raise CommandError(f"no session can be named {session!r}: that is not valid UTF-8") from error

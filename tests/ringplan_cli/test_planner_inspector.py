"""The connection to a planner that only looks: what goes wrong is one clear line."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ringplan.planner.v1 import planner_pb2, planner_pb2_grpc
from ringplan_cli.errors import CommandError
from ringplan_cli.planner_inspector import NotOfferedError, PlannerInspector


class _Planner(planner_pb2_grpc.PlannerServiceServicer):
    """A planner of somebody else's: it lists sessions, and shows none."""

    def ListSessions(  # noqa: N802  # gRPC names it.
        self, request: planner_pb2.ListSessionsRequest, context: object
    ) -> planner_pb2.ListSessionsResponse:
        """Returns one session."""
        return planner_pb2.ListSessionsResponse(sessions=[planner_pb2.SessionSummary(session="s")])


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """Where that planner serves."""
    server = grpc.server(ThreadPoolExecutor(1))
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(_Planner(), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    yield f"{tmp_path}/socket"
    server.stop(None).wait()


@pytest.mark.parametrize("scheme", ["", "unix:"])
def test_socket_is_a_path_or_a_target(socket: str, scheme: str) -> None:
    """Both ways to write where a planner serves are understood."""
    with PlannerInspector(scheme + socket) as inspector:
        assert [summary.session for summary in inspector.list_sessions().sessions] == ["s"]


def test_planner_that_shows_nothing_is_told_apart(socket: str) -> None:
    """Another implementation may leave the dump out: who can do without it goes on."""
    with PlannerInspector(socket) as inspector, pytest.raises(NotOfferedError, match="shows no sessions"):
        inspector.dump_session("s")


def test_planner_that_makes_no_drills_is_told_apart(socket: str) -> None:
    """They are no part of planning: another implementation may leave them out."""
    with PlannerInspector(socket) as inspector, pytest.raises(NotOfferedError, match="makes no drills"):
        inspector.drill_mismatch("s")


def test_name_that_no_message_can_carry_is_one_clear_line(socket: str) -> None:
    """An argument that is no UTF-8 names no session, and the planner is not asked for one."""
    with PlannerInspector(socket) as inspector:
        for ask in (inspector.dump_session, inspector.drill_mismatch):
            with pytest.raises(CommandError, match=r"^no session can be named '\\udcff': that is not valid UTF-8$"):
                ask("\udcff")


def test_path_that_no_socket_can_have_is_one_clear_line() -> None:
    """The length is named."""
    with pytest.raises(CommandError, match=r"^unix:/x+: 108 bytes; a unix socket's path has at most 107$"):
        PlannerInspector("/" + 107 * "x")


def test_messages_name_the_socket_as_it_was_given(tmp_path: Path) -> None:
    """What gRPC needs to be escaped is shown as it is."""
    with PlannerInspector(f"{tmp_path}/100%") as inspector, pytest.raises(CommandError) as error:
        inspector.list_sessions()
    assert str(error.value) == f"no planner answers at unix:{tmp_path}/100%"


def test_nobody_there_is_one_clear_line(tmp_path: Path) -> None:
    """No gRPC words, no traceback, no long wait."""
    with PlannerInspector(f"{tmp_path}/none") as inspector, pytest.raises(CommandError) as error:
        inspector.list_sessions()
    assert str(error.value) == f"no planner answers at unix:{tmp_path}/none"

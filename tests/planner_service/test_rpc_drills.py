"""Drills over gRPC: allowed only where the planner was started so, for one session that verifies."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from planner_service.rpc import REASON_KEY
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.planner_thread import (
    DRILL_MISMATCH,
    LIST_SESSIONS,
    PlanCall,
    PlannerThread,
    build_layout,
    open_channel,
)


@dataclass
class DrillablePlanner:
    """A planner and a connection to it."""

    planner: PlannerThread
    channel: grpc.Channel

    def open(self, cache_mode: pb.CacheMode.ValueType = pb.CACHE_MODE_VERIFY) -> PlanCall:
        """Opens a session with a cached plan of two rows."""
        options = pb.SessionOptions(page_size=4, num_pages=64, max_streams=16, ring_depth=8, cache_mode=cache_mode)
        call = PlanCall(self.channel)
        call.open(pb.PlanRequest(open=options))
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0, 1], repeat=2)]))
        call.receive(2)
        return call

    def drill(self, session: str = "") -> pb.DrillMismatchResponse:
        """Asks for a drill."""
        request = pb.DrillMismatchRequest(session=session).SerializeToString()
        return pb.DrillMismatchResponse.FromString(self.channel.unary_unary(DRILL_MISMATCH)(request, timeout=30))

    def list_sessions(self) -> list[pb.SessionSummary]:
        """Returns the open sessions."""
        answer = self.channel.unary_unary(LIST_SESSIONS)(b"", timeout=30)
        return list(pb.ListSessionsResponse.FromString(answer).sessions)

    def read_metric(self, name: str, **labels: str) -> float | None:
        """Returns a sample's value."""
        return self.planner.registry.get_sample_value(name, labels)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(params=[{"allows_drills": True}])
def drillable(folder: Path, request: pytest.FixtureRequest) -> Iterator[DrillablePlanner]:
    """A planner that allows drills, unless a test says otherwise."""
    planner = PlannerThread(folder, **request.param)
    with open_channel(planner.socket) as channel:
        yield DrillablePlanner(planner, channel)
    planner.stop()


def _expect_refusal(drillable: DrillablePlanner, session: str = "") -> tuple[str, str, str]:
    """Returns the status, reason and message of a drill that is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        drillable.drill(session)
    metadata = dict(caught.value.trailing_metadata() or ())
    return caught.value.code().name, str(metadata[REASON_KEY]), caught.value.details() or ""


def test_a_drill_happens_when_the_session_uses_its_plan_cache_next(drillable: DrillablePlanner) -> None:
    """Until then it is pending; then it counts as a mismatch and as a drill, and its capture is where it was said."""
    call = drillable.open()
    response = drillable.drill()
    (summary,) = drillable.list_sessions()
    assert (response.session, response.capture_dir) == (summary.session, str(drillable.planner.captures))
    assert (summary.is_drill_pending, summary.num_cache_mismatches) == (True, 0)
    call.send(pb.PlanRequest(layouts=[build_layout(3, [0, 1], repeat=2)]))
    call.receive(2)
    (summary,) = drillable.list_sessions()
    assert (summary.is_drill_pending, summary.num_cache_mismatches) == (False, 1)
    labels = {"session": response.session}
    assert drillable.read_metric("ringplan_plan_cache_mismatches_total", plan_label="main", **labels) == 1
    assert drillable.read_metric("ringplan_drills_total", **labels) == 1
    assert len(list(drillable.planner.captures.iterdir())) == 1


@pytest.mark.parametrize("drillable", [{"allows_drills": True, "max_captures": 0}], indirect=True)
def test_no_folder_is_named_where_no_capture_will_be_written(drillable: DrillablePlanner) -> None:
    """Nobody looks for a file that is not there."""
    drillable.open()
    assert drillable.drill().capture_dir == ""


@pytest.mark.parametrize("drillable", [{}], indirect=True)
def test_a_planner_that_was_not_started_for_it_refuses(drillable: DrillablePlanner) -> None:
    """Nobody who can reach the socket can raise an alarm by mistake; the message names the flag."""
    drillable.open()
    code, reason, message = _expect_refusal(drillable)
    assert (code, reason) == ("FAILED_PRECONDITION", "DRILL_REFUSED")
    assert "--allow-drills" in message
    assert not drillable.list_sessions()[0].is_drill_pending


def test_a_session_that_does_not_verify_refuses(drillable: DrillablePlanner) -> None:
    """The wrong plan would be served."""
    drillable.open(pb.CACHE_MODE_ON)
    assert _expect_refusal(drillable)[:2] == ("FAILED_PRECONDITION", "DRILL_REFUSED")


def test_one_session_of_several_must_be_named(drillable: DrillablePlanner) -> None:
    """Only the one that is named has the drill; one that is not open is NOT_FOUND."""
    assert _expect_refusal(drillable)[:2] == ("FAILED_PRECONDITION", "SESSION_NOT_NAMED")
    calls = [drillable.open(), drillable.open()]
    assert _expect_refusal(drillable)[:2] == ("FAILED_PRECONDITION", "SESSION_NOT_NAMED")
    assert _expect_refusal(drillable, "session-9")[:2] == ("NOT_FOUND", "UNKNOWN_SESSION")
    names = [summary.session for summary in drillable.list_sessions()]
    assert drillable.drill(names[1]).session == names[1]
    assert [summary.is_drill_pending for summary in drillable.list_sessions()] == [False, True]
    assert len(calls) == 2


def test_a_drill_that_is_pending_ends_with_its_session(drillable: DrillablePlanner) -> None:
    """The next session starts without one, and no series of the ended one is left."""
    call = drillable.open()
    name = drillable.drill().session
    call.end()
    assert list(call.call) == []
    drillable.planner.run(drillable.planner.servicer.wait_until_idle())
    samples = [sample for family in drillable.planner.registry.collect() for sample in family.samples]
    assert [sample.name for sample in samples if sample.labels.get("session") == name] == []
    assert drillable.open() is not None
    assert not drillable.list_sessions()[0].is_drill_pending

"""The client against a real planner process: what is shared, what is lost with a session, and that nothing hangs."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner_service.client import (
    OutOfPagesError,
    Plan,
    PlannerClient,
    PlannerSession,
    PlannerUnavailableError,
    ProtocolError,
    RingTimeoutError,
    Segment,
    SessionLostError,
)
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_process import PlannerProcess, run_planner

TIMEOUT_SECONDS = 20.0


@pytest.fixture
def client(planner_process: PlannerProcess) -> Iterator[PlannerClient]:
    """A connection to the shared planner."""
    with PlannerClient(planner_process.target) as client:
        yield client


def _open(client: PlannerClient, **options: int) -> PlannerSession:
    return client.open_session(**{"page_size": 4, "num_pages": 64, "max_streams": 8, **options})  # type: ignore[arg-type]  # All ints.


def _plan(session: PlannerSession, *segments: Segment, commit: bool = True) -> Plan:
    session.submit(session.build_layout(segments, commit=commit))
    return session.next_plan(TIMEOUT_SECONDS)


def _finish(session: PlannerSession, plan: Plan) -> None:
    session.commit(plan.step_id)
    session.release(plan.step_id)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def _find(planner: PlannerProcess, session: PlannerSession) -> pb.SessionSummary | None:
    return next((summary for summary in planner.list_sessions() if summary.session == session.name), None)


def test_the_designs_example_comes_out_as_written(client: PlannerClient) -> None:
    """Streams of 5 and 8 tokens, a decode step and a padding row, page size 4: the arrays of DESIGN.md, section 2."""
    with _open(client) as session:
        _finish(session, _plan(session, Segment("a", "main", 5), Segment("b", "main", 8)))
        arrays = _plan(session, Segment("a", "main"), Segment("b", "main"), Segment(None, "main")).labels["main"]
        assert arrays.qo_indptr.tolist() == [0, 1, 2, 3]
        assert arrays.paged_kv_indptr.tolist() == [0, 2, 5, 6]
        assert arrays.paged_kv_indices.tolist() == [1, 2, 3, 4, 5, 0]
        assert arrays.paged_kv_last_page_len.tolist() == [2, 1, 1]
        assert arrays.kv_lens.tolist() == [6, 9, 1]
        assert arrays.slot_mapping.tolist() == [9, 20, 0]
        assert arrays.positions.tolist() == [5, 8, 0]


def test_closing_a_session_gives_everything_back(planner_process: PlannerProcess, client: PlannerClient) -> None:
    """After `close` the planner knows the session no more, and its region has no file."""
    session = _open(client)
    _plan(session, Segment("a", "main", 5))
    assert _find(planner_process, session) is not None
    session.close()
    assert _find(planner_process, session) is None


def test_a_mapped_region_has_no_file(planner_process: PlannerProcess, client: PlannerClient) -> None:
    """Once both sides have mapped a region its name is gone, so nothing is left behind by whoever is killed."""
    with _open(client) as session:
        _plan(session, Segment("a", "main", 5))
        _wait_until(lambda: not list(planner_process.ring_dir.glob("*.region")))


def test_plans_outlive_their_session_as_memory(client: PlannerClient) -> None:
    """Views keep their mapping: neither closing nor losing everything else takes the memory from under them."""
    with _open(client) as session:
        plan = _plan(session, Segment("a", "main", 5))
    del session
    gc.collect()
    assert plan.labels["main"].positions.tolist() == [0, 1, 2, 3, 4]


def test_two_sessions_share_nothing(client: PlannerClient) -> None:
    """Each session has all pages of its own pool, on one connection too."""
    with _open(client) as first, _open(client) as second:
        for session in (first, second):
            arrays = _plan(session, Segment("a", "main", 5)).labels["main"]
            assert arrays.paged_kv_indices.tolist() == [1, 2]


def test_a_ring_grows_when_a_plan_needs_it(client: PlannerClient) -> None:
    """A plan larger than a set stands in a new region, while the old one's plans stay readable."""
    with _open(client, set_bytes=1024, num_pages=4096) as session:
        small = _plan(session, Segment("a", "main", 5))
        session.commit(small.step_id)
        large = _plan(session, Segment("b", "main", 4000))
        assert large.region_id > small.region_id
        assert large.labels["main"].positions.tolist() == list(range(4000))
        assert small.labels["main"].positions.tolist() == [0, 1, 2, 3, 4]


def test_a_layout_that_fails_is_told_and_changes_nothing(client: PlannerClient) -> None:
    """Out of pages: the error carries its figures, and the next step finds the tables as they were."""
    with _open(client, num_pages=4) as session:
        _finish(session, _plan(session, Segment("a", "main", 8)))
        session.submit(session.build_layout([Segment("b", "main", 9)]))
        with pytest.raises(OutOfPagesError) as caught:
            session.next_plan(TIMEOUT_SECONDS)
        assert (caught.value.num_short, caught.value.step_id, caught.value.num_steps) == (2, 2, 1)
        assert _plan(session, Segment("b", "main", 4)).labels["main"].paged_kv_indices.tolist() == [3]


def test_a_run_ends_where_pages_do(client: PlannerClient) -> None:
    """Steps of a run are planned until one fails; the rest of the run fails with it."""
    with _open(client, num_pages=3, ring_depth=8) as session:
        _finish(session, _plan(session, Segment("a", "main", 6)))
        session.submit(session.build_layout([Segment("a", "main")]), repeat=5)
        assert [session.next_plan(TIMEOUT_SECONDS).step_id for _ in range(2)] == [2, 3]
        with pytest.raises(OutOfPagesError) as caught:
            session.next_plan(TIMEOUT_SECONDS)
        assert (caught.value.step_id, caught.value.num_steps, session.num_outstanding()) == (4, 3, 0)


def test_a_set_that_is_never_released_times_the_next_step_out(short_folder: Path) -> None:
    """With all sets leased a step fails after the ring time-out, naming the oldest lease; then things go on."""
    with (
        run_planner(short_folder, ring_timeout_seconds=0.1) as planner,
        PlannerClient(planner.target) as client,
        _open(client) as session,
    ):
        first, _ = _plan(session, Segment("a", "main", 5)), _plan(session, Segment("a", "main"))
        session.submit(session.build_layout([Segment("a", "main")]))
        with pytest.raises(RingTimeoutError) as caught:
            session.next_plan(TIMEOUT_SECONDS)
        assert caught.value.oldest_step_id == first.step_id
        assert caught.value.oldest_age_seconds >= 0.1
        _finish(session, first)
        assert _plan(session, Segment("a", "main")).labels["main"].kv_lens.tolist() == [7]


def test_a_broken_protocol_ends_the_session_with_the_planners_words(client: PlannerClient) -> None:
    """What the client cannot know, the planner checks: a stream is not cut to more than it has."""
    with _open(client) as session:
        _finish(session, _plan(session, Segment("a", "main", 5)))
        session.truncate("a", "main", 6)
        session.submit(session.build_layout([Segment("a", "main")]))
        with pytest.raises(ProtocolError, match="6"):
            session.next_plan(TIMEOUT_SECONDS)


def test_a_killed_planner_is_noticed_by_a_waiting_engine(own_planner: PlannerProcess) -> None:
    """`next_plan` without a time-out ends when the planner does."""
    with PlannerClient(own_planner.target) as client, _open(client) as session:
        plan = _plan(session, Segment("a", "main", 5))
        own_planner.pause()
        session.submit(session.build_layout([Segment("a", "main")]))
        threading.Timer(0.05, own_planner.kill).start()
        with pytest.raises(SessionLostError) as caught:
            session.next_plan()
        assert caught.value.status == "UNAVAILABLE"
        for call in (session.flush, session.next_plan):
            with pytest.raises(SessionLostError):
                call()
        assert plan.labels["main"].kv_lens.tolist() == [5]


def test_a_client_finds_a_planner_that_came_back(own_planner: PlannerProcess) -> None:
    """After the planner's death a new session on the same client waits for the next planner; the old one stays lost."""
    with PlannerClient(own_planner.target) as client:
        lost = _open(client)
        own_planner.kill()
        with pytest.raises(SessionLostError):
            _plan(lost, Segment("a", "main"))
        restart = threading.Thread(target=own_planner.start)
        restart.start()
        with _open(client) as session:
            assert _plan(session, Segment("a", "main", 5)).labels["main"].kv_lens.tolist() == [5]
        restart.join()
        with pytest.raises(SessionLostError):
            lost.flush()


def test_a_planner_that_is_asked_to_end_says_so(own_planner: PlannerProcess) -> None:
    """After SIGTERM and its grace a session ends with the reason, not as a mere broken connection."""
    with PlannerClient(own_planner.target) as client, _open(client) as session:
        session.submit(session.build_layout([Segment("a", "main", 5)]), repeat=3)
        for _ in range(2):
            session.next_plan(TIMEOUT_SECONDS)
        # The third plan waits for a set, so only the session's end can end this wait.
        threading.Thread(target=own_planner.stop).start()
        with pytest.raises(SessionLostError, match="the planner is shutting down"):
            session.next_plan()


def test_nothing_waits_for_a_planner_that_stands_still(own_planner: PlannerProcess) -> None:
    """With the planner stopped, plans time out, closing gives up, and opening says that nobody answers."""
    client = PlannerClient(own_planner.target, connect_timeout_seconds=2.0)
    session = _open(client)
    own_planner.pause()
    session.submit(session.build_layout([Segment("a", "main")]))
    with pytest.raises(TimeoutError):
        session.next_plan(0.01)
    session.close()
    with pytest.raises(PlannerUnavailableError, match="no session was opened"):
        _open(client)
    client.close()
    with pytest.raises(PlannerUnavailableError, match="the client is closed"):
        _open(client)


def test_a_session_whose_planner_died_is_gone_with_its_last_reference(own_planner: PlannerProcess) -> None:
    """No cycle keeps it: its mapped memory goes without waiting for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with PlannerClient(own_planner.target) as client:
            session = _open(client)
            session.submit(session.build_layout([Segment("a", "main")]))
            session.next_plan(10.0)
            own_planner.kill()
            with pytest.raises(SessionLostError):
                _wait_until_lost(session)
            session.close()
        reference = weakref.ref(session)
        del session
        assert reference() is None
    finally:
        gc.enable()


def _wait_until_lost(session: PlannerSession) -> None:
    for _ in range(500):
        session.flush()
        time.sleep(0.02)


def test_closing_the_client_closes_its_sessions(planner_process: PlannerProcess) -> None:
    """A closed client leaves no session behind, and may be closed again."""
    client = PlannerClient(planner_process.target)
    sessions = [_open(client) for _ in range(3)]
    client.close()
    client.close()
    for session in sessions:
        with pytest.raises(SessionLostError, match="closed by the engine"):
            session.flush()
        assert _find(planner_process, session) is None


def test_a_refused_option_is_named_by_whoever_refuses_it(short_folder: Path) -> None:
    """A planner that takes no more sessions says so."""
    with run_planner(short_folder, max_sessions=1) as planner, PlannerClient(planner.target) as client, _open(client):
        with pytest.raises(PlannerUnavailableError, match="1 sessions are open") as caught:
            _open(client)
        assert caught.value.status == "RESOURCE_EXHAUSTED"


def test_a_killed_engines_session_is_gone(planner_process: PlannerProcess) -> None:
    """An engine that dies without a word leaves neither a session nor a file."""
    code = (
        "import time, sys; from planner_service.client import PlannerClient\n"
        "client = PlannerClient(sys.argv[1])\n"
        "session = client.open_session(page_size=4, num_pages=64, max_streams=8, engine_name='doomed')\n"
        "print('open', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, planner_process.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"open\n"
        assert "doomed" in [summary.engine_name for summary in planner_process.list_sessions()]
        engine.kill()
    _wait_until(lambda: "doomed" not in [summary.engine_name for summary in planner_process.list_sessions()])
    assert not list(planner_process.ring_dir.glob("*.region"))

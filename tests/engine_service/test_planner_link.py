"""Rules of the engine's link to its planner, on a real planner process."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service.planner_link import PlannerLink
from engine_service.step_layout import MAIN_LABEL, StepSpec
from planner_service.client import CacheMode, OutOfPagesError, PlannerUnavailableError, Segment, SessionLostError
from ringplan.planner.v1 import planner_pb2
from tests.planner_process import PlannerProcess, run_planner


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """A planner for the tests here that leave it running."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder, run_planner(Path(folder)) as planner:
        yield planner


def build_link(planner: PlannerProcess, **given: object) -> PlannerLink:
    """Returns a link with 10 usable pages of 4 tokens."""
    options = {"page_size": 4, "num_pages": 11, "max_running_requests": 4, "engine_name": "link"} | given
    return PlannerLink(planner.target, **options)  # type: ignore[arg-type]  # The tests' options have several types.


@pytest.fixture
def link(planner: PlannerProcess) -> Iterator[PlannerLink]:
    """A connected link."""
    link = build_link(planner)
    link.connect(10)
    yield link
    link.close()


def make_step(*rows: tuple[int | None, int]) -> StepSpec:
    """Returns a step of these rows: (request, span)."""
    return StepSpec(tuple(Segment(request, MAIN_LABEL, span) for request, span in rows))


def find_session(planner: PlannerProcess) -> planner_pb2.SessionSummary:
    """Returns the link's session as the planner sees it."""
    (session,) = [one for one in planner.list_sessions() if one.engine_name == "link"]
    return session


def test_rows_stand_in_their_order_under_one_plan_label(link: PlannerLink) -> None:
    """Two rows of 5 and 2 tokens: their lengths, and the slots of pages 1, 2 and 3."""
    plan = link.plan_step(make_step((1, 5), (2, 2)))
    arrays = plan.labels[MAIN_LABEL]
    assert arrays.kv_lens.tolist() == [5, 2]
    assert arrays.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13]


def test_kept_step_moves_lengths_and_one_taken_back_does_not(link: PlannerLink) -> None:
    """A step that failed is planned again as if it had never been."""
    link.end_step(link.plan_step(make_step((1, 5))), is_kept=True)
    link.end_step(link.plan_step(make_step((1, 2))), is_kept=False)
    assert link.plan_step(make_step((1, 1))).labels[MAIN_LABEL].kv_lens.tolist() == [6]


def test_dropped_request_starts_over(link: PlannerLink, planner: PlannerProcess) -> None:
    """What a request held is free once that is flushed, and its name may be used again at once."""
    link.end_step(link.plan_step(make_step((1, 9))), is_kept=True)
    link.drop(1)
    link.flush()
    while find_session(planner).num_free_pages != 10:
        pass
    assert link.plan_step(make_step((1, 3))).labels[MAIN_LABEL].kv_lens.tolist() == [3]


def test_out_of_pages_leaves_the_session_as_it_was(link: PlannerLink) -> None:
    """A step that does not fit is refused with the figures; a smaller one is planned."""
    with pytest.raises(OutOfPagesError) as caught:
        link.plan_step(make_step((1, 41)))
    assert caught.value.num_short == 1
    assert link.plan_step(make_step((1, 40))).labels[MAIN_LABEL].kv_lens.tolist() == [40]


def test_options_reach_the_planner(planner: PlannerProcess) -> None:
    """Ring depth and cache mode are the engine's choice, where it makes one."""
    link = build_link(planner, ring_depth=3, cache_mode=CacheMode.VERIFY)
    link.connect(10)
    try:
        session = find_session(planner)
        assert (session.ring_depth, session.cache_mode) == (3, planner_pb2.CACHE_MODE_VERIFY)
        assert (session.page_size, session.num_pages) == (4, 11)
    finally:
        link.close()


def test_closed_link_has_no_session(link: PlannerLink) -> None:
    """Closing twice is no error; dropping has nothing to drop; planning is refused."""
    link.close()
    link.close()
    assert not link.is_connected
    link.drop(1)
    with pytest.raises(SessionLostError):
        link.plan_step(make_step((1, 1)))


def test_connecting_again_starts_from_nothing(link: PlannerLink) -> None:
    """A new session knows nothing of the last one's requests."""
    link.end_step(link.plan_step(make_step((1, 5))), is_kept=True)
    link.connect(10)
    assert link.plan_step(make_step((1, 1))).labels[MAIN_LABEL].kv_lens.tolist() == [1]


def test_missing_planner_is_told_in_time(tmp_path: Path) -> None:
    """Nobody at the socket: an error, no session, and a later attempt may succeed."""
    link = PlannerLink(f"unix:{tmp_path}/none.sock", page_size=4, num_pages=11, max_running_requests=4)
    with pytest.raises(PlannerUnavailableError):
        link.connect(0.1)
    assert not link.is_connected


def test_planner_that_does_not_answer_counts_as_lost(planner: PlannerProcess) -> None:
    """The wait for a plan is bounded; the error is that of a lost session."""
    link = build_link(planner, plan_timeout_seconds=0.1)
    link.connect(10)
    planner.pause()
    try:
        with pytest.raises(SessionLostError, match="no answer"):
            link.plan_step(make_step((1, 1)))
    finally:
        planner.go_on()
        link.close()


def test_memory_of_a_lost_session_is_given_back_by_the_next(planner: PlannerProcess) -> None:
    """Python may not collect by itself for hours: the regions of planners that are gone must not pile up."""

    def count_regions() -> int:
        return sum(str(planner.ring_dir) in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    gc.disable()
    try:
        link = build_link(planner)
        num_regions = []
        for _ in range(4):
            link.connect(10)
            link.end_step(link.plan_step(make_step((1, 5))), is_kept=True)
            num_regions.append(count_regions())
        link.close()
    finally:
        gc.enable()
    assert num_regions == [num_regions[0]] * 4

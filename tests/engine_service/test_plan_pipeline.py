"""Rules of planning ahead, on a real planner process."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_service.plan_pipeline import PlanPipeline, choose_ring_depth
from engine_service.step_layout import StepSpec
from planner_service.client import OutOfPagesError, Plan, PlannerClient, PlannerSession, Segment
from ringplan.planner.v1 import planner_pb2
from tests.planner_process import PlannerProcess, run_planner

PAGE_SIZE = 2
SINK_PAGE = 0


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """A planner whose steps do not wait long for a buffer set."""
    with (
        tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder,
        run_planner(Path(folder), ring_timeout_seconds=0.2) as planner,
    ):
        yield planner


@pytest.mark.parametrize(("plan_ahead", "depth"), [(0, 2), (1, 2), (8, 16), (512, 1_024), (1_024, 1_024)])
def test_the_ring_has_room_for_two_runs(plan_ahead: int, depth: int) -> None:
    """One run is read while the next is planned; a ring has 2 to 1,024 sets."""
    assert choose_ring_depth(plan_ahead) == depth


@contextmanager
def open_session(planner: PlannerProcess, num_pages: int = 101) -> Iterator[PlannerSession]:
    """Opens a session named "pipeline" with pages of 2 tokens, a ring of 2 sets and the cache on."""
    with (
        PlannerClient(planner.target) as client,
        client.open_session(
            page_size=PAGE_SIZE, num_pages=num_pages, max_streams=8, ring_depth=2, engine_name="pipeline"
        ) as session,
    ):
        yield session


def build_pipeline(session: PlannerSession, plan_ahead: int = 8) -> PlanPipeline:
    """Returns a pipeline over a session."""
    return PlanPipeline(session, plan_ahead=plan_ahead, timeout_seconds=20)


def make_step(*rows: tuple[int | None, int]) -> StepSpec:
    """Returns a step of these rows: (request, span)."""
    return StepSpec(tuple(Segment(request, "main", span) for request, span in rows))


def find_session(planner: PlannerProcess) -> planner_pb2.SessionSummary:
    """Returns the session as the planner sees it."""
    (session,) = [one for one in planner.list_sessions() if one.engine_name == "pipeline"]
    return session


def read_lengths(plan: Plan) -> list[int]:
    """Returns the rows' lengths."""
    return plan.labels["main"].kv_lens.tolist()


def wait_until_ready(session: PlannerSession) -> None:
    """Returns once a plan can be taken without waiting."""
    while not session.num_ready():
        threading.Event().wait(0.001)


def test_steady_steps_find_their_plans_ready(planner: PlannerProcess) -> None:
    """Of 30 equal steps the first waits for its plan; every later one is planned while another runs."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session)
        for step in range(30):
            plan = pipeline.plan_step(make_step((1, 1), (2, 1)), 30 - step)
            assert read_lengths(plan) == [step + 1, step + 1]
            assert pipeline.was_plan_ready == (step > 0)
            if step < 29:
                wait_until_ready(session)
            pipeline.end_step(plan, is_kept=True)
        assert session.num_outstanding() == 0, "nothing is planned beyond the steps that were to come"


@pytest.mark.parametrize("plan_ahead", [1, 2, 3, 8])
def test_next_run_is_asked_for_in_time(planner: PlannerProcess, plan_ahead: int) -> None:
    """However few steps are planned ahead, one more is on its way while a step runs."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session, plan_ahead)
        for step in range(20):
            plan = pipeline.plan_step(make_step((1, 1)), 20 - step)
            assert session.num_outstanding() == 0 if step == 19 else 1 <= session.num_outstanding() <= 2 * plan_ahead
            pipeline.end_step(plan, is_kept=True)


def test_without_planning_ahead_each_step_is_planned_when_it_begins(planner: PlannerProcess) -> None:
    """Nothing is on its way while a step runs."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session, 0)
        for step in range(3):
            plan = pipeline.plan_step(make_step((1, 1)), 10)
            assert (read_lengths(plan), session.num_outstanding()) == ([step + 1], 0)
            pipeline.end_step(plan, is_kept=True)


def test_another_batch_discards_what_is_stale(planner: PlannerProcess) -> None:
    """A request that joins or leaves changes the batch; lengths go on from the steps that ran."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session)
        for rows, lengths in (
            ([(1, 1)], [1]),
            ([(1, 1)], [2]),
            ([(1, 1), (2, 5)], [3, 5]),
            ([(1, 1), (2, 1), (None, 1)], [4, 6, 1]),
            ([(2, 1)], [7]),
            ([(2, 1), (1, 1)], [8, 5]),
        ):
            plan = pipeline.plan_step(make_step(*rows), 100)
            assert read_lengths(plan) == lengths
            pipeline.end_step(plan, is_kept=True)


def test_dropped_request_takes_what_was_planned_for_it_along(planner: PlannerProcess) -> None:
    """After a drop in the middle of a run nothing is left of it, and its pages are free."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session)
        pipeline.end_step(pipeline.plan_step(make_step((1, 1)), 100), is_kept=True)
        pipeline.drop(1)
        assert session.num_outstanding() == 0
        pipeline.flush()
        while find_session(planner).num_free_pages != 100:
            threading.Event().wait(0.01)
        assert read_lengths(pipeline.plan_step(make_step((1, 3)))) == [3]


def test_step_that_is_taken_back_is_planned_again(planner: PlannerProcess) -> None:
    """A step that failed takes those planned behind it along."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session)
        pipeline.end_step(pipeline.plan_step(make_step((1, 1)), 100), is_kept=True)
        pipeline.end_step(pipeline.plan_step(make_step((1, 1)), 99), is_kept=False)
        assert read_lengths(pipeline.plan_step(make_step((1, 1)), 99)) == [2]


def test_pages_planned_ahead_keep_no_step_from_running(planner: PlannerProcess) -> None:
    """Pages that discarded steps left with their streams are given up when another step needs them."""
    with open_session(planner, num_pages=1 + 6) as session:
        pipeline = build_pipeline(session)
        # Eight steps ahead take 5 of the 6 pages; one token takes 1.
        pipeline.end_step(pipeline.plan_step(make_step((1, 1)), 8), is_kept=True)
        plan = pipeline.plan_step(make_step((1, 1), (2, 10)))
        assert read_lengths(plan) == [2, 10]
        pipeline.end_step(plan, is_kept=True)
        with pytest.raises(OutOfPagesError):
            pipeline.plan_step(make_step((1, 1), (2, 1)))
        assert read_lengths(pipeline.plan_step(make_step((1, 0), (2, 0)))) == [2, 10], "the session goes on"


def test_run_that_outgrows_the_pool_stops_where_pages_end(planner: PlannerProcess) -> None:
    """Steps ahead that find no page are no error until their turn comes; then the caller hears of it once."""
    with open_session(planner, num_pages=1 + 4) as session:
        pipeline = build_pipeline(session)
        for step in range(4):
            plan = pipeline.plan_step(make_step((1, 1), (2, 1)), 100)
            assert read_lengths(plan) == [step + 1, step + 1]
            pipeline.end_step(plan, is_kept=True)
        with pytest.raises(OutOfPagesError):
            pipeline.plan_step(make_step((1, 1), (2, 1)), 96)
        pipeline.drop(2)
        assert read_lengths(pipeline.plan_step(make_step((1, 1)), 96)) == [5]


def test_step_that_takes_longer_than_the_ring_waits_costs_nothing(planner: PlannerProcess) -> None:
    """Plans ahead that found no buffer set in time are made again."""
    with open_session(planner) as session:
        pipeline = build_pipeline(session)
        for step in range(6):
            plan = pipeline.plan_step(make_step((1, 1)), 100)
            assert read_lengths(plan) == [step + 1]
            if step == 1:
                # Two sets: this step's and the next one's. The step after that has failed when there are two results.
                while session.num_ready() < 2:
                    threading.Event().wait(0.01)
            pipeline.end_step(plan, is_kept=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), plan_ahead=st.sampled_from([0, 1, 2, 8, 32]))
def test_any_history_reads_what_its_streams_hold(planner: PlannerProcess, data: st.DataObject, plan_ahead: int) -> None:
    """Whatever runs, fails, is dropped or finds no page: every row reads exactly the tokens its stream was given."""
    with open_session(planner, num_pages=1 + data.draw(st.sampled_from([8, 14, 100]), "pages")) as session:
        pipeline = build_pipeline(session, plan_ahead)
        held: dict[int, list[tuple[int, int]]] = {}
        slots: dict[int, tuple[int, int]] = {}
        for number in range(data.draw(st.integers(1, 12), "runs")):
            rows = data.draw(
                st.dictionaries(st.integers(1, 5), st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=4), "rows"
            )
            num_padding = data.draw(st.integers(0, 2), "padding")
            spec = make_step(*rows.items(), *[(None, 1)] * num_padding)
            num_steps = data.draw(st.integers(1, 12), "steps") if set(rows.values()) == {1} else 1
            for step in range(num_steps):
                try:
                    plan = pipeline.plan_step(spec, num_steps - step)
                except OutOfPagesError:
                    victim = max(rows)
                    pipeline.drop(victim)
                    held.pop(victim, None)
                    break
                is_kept = data.draw(st.integers(0, 9), "fails") > 0
                _run_step(plan, rows, held, slots, number * 100 + step)
                pipeline.end_step(plan, is_kept=is_kept)
                if not is_kept:
                    for request, span in rows.items():
                        del held[request][-span:]
                    break
            if data.draw(st.booleans(), "drops"):
                dropped = data.draw(st.integers(1, 5), "who")
                pipeline.drop(dropped)
                held.pop(dropped, None)


def _run_step(
    plan: Plan,
    rows: dict[int, int],
    held: dict[int, list[tuple[int, int]]],
    slots: dict[int, tuple[int, int]],
    number: int,
) -> None:
    """Writes a token of its own for every query token, then checks what each row reads."""
    arrays = plan.labels["main"]
    free_slots = iter(arrays.slot_mapping.tolist())
    for request, span in rows.items():
        for _ in range(span):
            token = (request, number * 100 + len(held.setdefault(request, [])))
            held[request].append(token)
            slots[next(free_slots)] = token
    assert all(slot // PAGE_SIZE == SINK_PAGE for slot in free_slots), "padding rows write to the sink page"
    indptr, indices = arrays.paged_kv_indptr.tolist(), arrays.paged_kv_indices.tolist()
    for row, request in enumerate(rows):
        pages = indices[indptr[row] : indptr[row + 1]]
        read = [slots.get(page * PAGE_SIZE + offset) for page in pages for offset in range(PAGE_SIZE)]
        assert arrays.kv_lens[row] == len(held[request])
        assert read[: len(held[request])] == held[request]

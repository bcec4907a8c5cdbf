"""`plan_copies.py`, on a real planner process: one copy a plan, and no buffer set rewritten while one is under way."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine_service.errors import CopyTimeoutError
from engine_service.planner_link import PlannerLink
from engine_service.step_layout import StepSpec
from engine_service.warm_up import build_padding_plan
from planner_service.client import RingTimeoutError, Segment
from tests.engine_service.copied_steps import (
    LABELS,
    PAGE_SIZE,
    RING_DEPTH,
    build_steps,
    make_decode_step,
    open_session,
    read_device_plan,
    read_plan,
)
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies
from tests.planner_process import PlannerProcess, run_planner

NUM_STEPS = 30


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """A planner."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder, run_planner(Path(folder)) as planner:
        yield planner


def test_one_copy_moves_a_whole_plan(planner: PlannerProcess) -> None:
    """Each step has one copy, of the plan's run and no more, and every array of three labels arrives."""
    engine = HeldCopyEngine()
    with open_session(planner) as session:
        steps = build_steps(session, build_held_copies(engine))
        for step in range(NUM_STEPS):
            said = steps.run(make_decode_step(), NUM_STEPS - step)
            assert read_device_plan(steps.plans[-1]) == said
            assert said.keys() == set(LABELS)
        assert engine.sizes == [steps_plan.plan.num_bytes // 4 for steps_plan in steps.plans]
        assert engine.num_rewritten == 0


@pytest.mark.parametrize("plan_ahead", [0, 1, 8])
@pytest.mark.parametrize("num_held_queries", [1, 7, 40])
def test_no_set_is_rewritten_while_its_copy_is_held_back(
    planner: PlannerProcess, plan_ahead: int, num_held_queries: int
) -> None:
    """With a ring of 2 and three labels, late copies still move what the plan said, and the engine goes on."""
    engine = HeldCopyEngine(num_held_queries, is_read=False)
    copies = build_held_copies(engine)
    with open_session(planner) as session:
        steps = build_steps(session, copies, plan_ahead)
        num_behind = 0
        for step in range(NUM_STEPS):
            steps.run(make_decode_step(), NUM_STEPS - step)
            num_behind += not engine.events[-1].is_made
        assert num_behind > NUM_STEPS // 2, "most steps ended before their plan had been copied"
        copies.fence.wait_for_all()
    assert engine.num_rewritten == 0
    assert len(engine.events) == NUM_STEPS
    assert all(event.is_made for event in engine.events)


def test_prompts_and_decode_steps_mixed_are_fenced_too(planner: PlannerProcess) -> None:
    """Steps that are not planned ahead, grow the ring and discard what was ahead keep the rule."""
    engine = HeldCopyEngine(5, is_read=False)
    copies = build_held_copies(engine)
    with open_session(planner, set_bytes=1_024) as session:
        steps = build_steps(session, copies)
        for number in range(12):
            steps.run(StepSpec((Segment(100 + number % 3, "main", 20 + 50 * number), Segment(0, "main"))))
            for left in range(3, 0, -1):
                steps.run(make_decode_step(), left)
        copies.fence.wait_for_all()
        buffers = [device_plan.plan.region_buffer for device_plan in steps.plans]
    assert engine.num_rewritten == 0
    assert len({id(buffer) for buffer in buffers}) > 1, "the ring has grown on the way"


def test_a_step_that_is_taken_back_waits_for_its_copy(planner: PlannerProcess) -> None:
    """A discard gives the set back at once, so the copy comes first."""
    engine = HeldCopyEngine(9, is_read=False)
    copies = build_held_copies(engine)
    with open_session(planner) as session:
        steps = build_steps(session, copies)
        for step in range(6):
            plan = steps.pipeline.plan_step(make_decode_step(), 10)
            with copies.reading(plan) as device_plan:
                copies.wait(device_plan)
            assert not engine.events[-1].is_made
            steps.pipeline.end_step(plan, is_kept=step % 2 == 0)
            assert engine.events[-1].is_made == (step % 2 == 1)
        assert len(steps.run(make_decode_step())) == len(LABELS)
    assert engine.num_rewritten == 0


def test_a_copy_that_is_never_made_ends_in_an_error(planner: PlannerProcess) -> None:
    """When every set waits for a copy, the step that needs one raises after the time-out instead of hanging."""
    engine = HeldCopyEngine(None, is_read=False)
    with open_session(planner) as session:
        steps = build_steps(session, build_held_copies(engine, timeout_seconds=0.3))
        for step in range(RING_DEPTH):
            steps.run(make_decode_step(), 10 - step)
        with pytest.raises(CopyTimeoutError, match="step 1 "):
            steps.run(make_decode_step(), 10 - RING_DEPTH)
        assert len(engine.events) == RING_DEPTH


def test_steps_that_get_no_set_in_time_come_again_when_copies_are_made() -> None:
    """The planner gives steps up while every set waits for its copy; the engine goes on, and no set is rewritten."""
    engine = HeldCopyEngine(600, is_read=False)
    copies = build_held_copies(engine)
    num_refused = 0
    with (
        tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder,
        run_planner(Path(folder), ring_timeout_seconds=0.05) as planner,
        open_session(planner) as session,
    ):
        steps = build_steps(session, copies)
        while len(engine.events) < 2 * RING_DEPTH:
            try:
                steps.run(make_decode_step(), 4)
            except RingTimeoutError:
                num_refused += 1
        copies.fence.wait_for_all()
    assert num_refused
    assert engine.num_rewritten == 0


def test_sets_whose_copies_are_made_while_nothing_runs_go_back_then(planner: PlannerProcess) -> None:
    """A flush of an idle engine tells the planner."""
    engine = HeldCopyEngine(1, is_read=False)
    copies = build_held_copies(engine)
    with open_session(planner, engine_name="idle") as session:  # type: ignore[arg-type]  # A name, among numbers.
        steps = build_steps(session, copies, plan_ahead=0)
        steps.run(make_decode_step())
        assert copies.fence.is_holding
        while copies.fence.is_holding:
            steps.pipeline.flush()
        while True:
            (summary,) = [one for one in planner.list_sessions() if one.engine_name == "idle"]
            if summary.num_leased_sets == 0:
                break
            threading.Event().wait(0.01)


def test_a_staging_is_copied_to_again_after_its_forward_alone(planner: PlannerProcess) -> None:
    """Two take turns; what a forward reads stands there until the second plan after it is copied."""
    engine = HeldCopyEngine()
    with open_session(planner) as session:
        steps = build_steps(session, build_held_copies(engine))
        said = [steps.run(make_decode_step(), 10) for _ in range(4)]
    assert engine.num_allocated == 2
    assert [read_device_plan(plan) for plan in steps.plans[2:]] == said[2:]
    pointers = [plan.labels["main"].qo_indptr.data_ptr() for plan in steps.plans]
    assert pointers[0] == pointers[2] != pointers[1] == pointers[3]
    # Of each step the event after its preparation, and the one after its forward.
    ends_of_forwards = engine.recorded[1::2]
    assert engine.afters == [None, None, *ends_of_forwards[:2]]


@pytest.mark.parametrize("spans", [(1, 1, 1), (64, 1, 7)])
def test_a_plan_that_stands_in_no_ring_is_copied_too(spans: Sequence[int]) -> None:
    """What warms a model up is copied before its memory can go, and nothing is released for it."""
    engine = HeldCopyEngine(None, is_read=False)
    copies = build_held_copies(engine)
    plan = build_padding_plan(spans, PAGE_SIZE)
    with copies.reading(plan) as device_plan:
        assert read_device_plan(device_plan) == read_plan(plan)
        copies.note_host_reads(device_plan)
    assert copies.fence.oldest_step_id is None


def test_the_end_of_a_session_waits_for_its_copies(planner: PlannerProcess) -> None:
    """The ring's memory is given up after the last copy, and a new session starts with no copy of the old one."""
    engine = HeldCopyEngine(9, is_read=False)
    copies = build_held_copies(engine)
    link = PlannerLink(
        planner.target,
        page_size=PAGE_SIZE,
        num_pages=101,
        max_running_requests=16,
        ring_depth=RING_DEPTH,
        copies=copies,
    )
    for _ in range(2):
        link.connect(10)
        plan = link.plan_step(make_decode_step())
        assert plan.step_id == 1
        with copies.reading(plan) as device_plan:
            copies.wait(device_plan)
        link.end_step(plan, is_kept=True)
        assert not engine.events[-1].is_made
    link.close()
    assert all(event.is_made for event in engine.events)
    assert engine.num_rewritten == 0


def test_a_lost_copy_does_not_keep_a_session_from_ending(
    planner: PlannerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The end is logged as what it is, and comes after the time-out."""
    copies = build_held_copies(HeldCopyEngine(None, is_read=False), timeout_seconds=0.2)
    link = PlannerLink(planner.target, page_size=PAGE_SIZE, num_pages=101, max_running_requests=16, copies=copies)
    link.connect(10)
    plan = link.plan_step(make_decode_step())
    with copies.reading(plan):
        pass
    link.end_step(plan, is_kept=True)
    link.close()
    assert "stays registered" in caplog.text
    assert np.array_equal(plan.labels["main"].kv_lens[:5], [1] * 5), "the memory is still mapped"

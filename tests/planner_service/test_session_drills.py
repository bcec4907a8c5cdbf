"""A mismatch made on purpose in a session: found once, told of as a drill, and never in a plan that is served."""

from dataclasses import replace

import pytest

from planner_service.core.layout import PlanLabelRows, StepLayout
from planner_service.errors import DrillRefusedError
from planner_service.messages import CacheMode, SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import pack_rows
from tests.reference.vector_replay import VectorReplay

OPTIONS = SessionOptions(page_size=4, num_pages=256, max_streams=8, ring_depth=4, cache_mode=CacheMode.VERIFY)
MAIN = (pack_rows("main", [(0, 1), (1, 1)]),)


class DrilledRun:
    """A session whose plans are compared with the naive planner's, drills or not.

    Args:
        mode: how it caches plans.
    """

    def __init__(self, mode: CacheMode = CacheMode.VERIFY) -> None:
        self.mirrored = MirroredSession(replace(OPTIONS, cache_mode=mode))
        self.step_id = 0
        self.plan((pack_rows("main", [(0, 5), (1, 3)]),))

    def plan(self, plan_labels: tuple[PlanLabelRows, ...] = MAIN, num_steps: int = 1) -> None:
        """Plans steps and runs them."""
        for _ in range(num_steps):
            self.step_id += 1
            self.mirrored.send(SessionMessage(layouts=(StepLayout(self.step_id, plan_labels),)))
            self.mirrored.send(SessionMessage(committed_through=self.step_id, released_through=self.step_id))

    def drill(self) -> None:
        """Asks for a drill."""
        self.mirrored.session.drill_mismatch()

    @property
    def is_pending(self) -> bool:
        """Whether a drill is to come."""
        return self.mirrored.session.summarize().is_drill_pending

    @property
    def num_mismatches(self) -> int:
        """Mismatches that were told of, each as a drill."""
        assert self.mirrored.observer.num_drilled == len(self.mirrored.observer.captures)
        assert self.mirrored.session.summarize().num_cache_mismatches == self.mirrored.observer.num_drilled
        return len(self.mirrored.observer.mismatches)


@pytest.mark.parametrize("num_steps_before", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "plan_labels",
    [
        MAIN,
        (pack_rows("main", [(-1, 1), (0, 1), (-1, 1)]), pack_rows("cfg_text", [(1, 1)])),
        (pack_rows("main", [(-1, 1), (-1, 1)]),),
    ],
)
def test_a_drill_makes_one_mismatch_and_no_wrong_plan(
    plan_labels: tuple[PlanLabelRows, ...], num_steps_before: int
) -> None:
    """Wherever rows cross pages and whatever the first row is: every plan served is the naive planner's."""
    run = DrilledRun()
    run.plan(plan_labels, num_steps_before)
    run.drill()
    run.plan(plan_labels)
    assert run.num_mismatches == 1
    assert not run.is_pending
    run.plan(plan_labels, 5)
    assert run.num_mismatches == 1
    run.mirrored.check_all_is_free()


def test_a_drill_waits_for_the_next_plan_that_hits() -> None:
    """Misses leave it pending; a run planned ahead has one wrong plan, not all of them."""
    run = DrilledRun()
    run.plan()
    run.drill()
    run.plan((pack_rows("main", [(2, 7)]),), 2)
    run.plan((pack_rows("main", [(2, 1)]),))
    assert (run.is_pending, run.num_mismatches) == (True, 0)
    layout = StepLayout(run.step_id + 1, (pack_rows("main", [(2, 1)]),), repeat=4)
    run.mirrored.send(SessionMessage(layouts=(layout,)))
    assert (run.is_pending, run.num_mismatches) == (False, 1)


def test_drills_can_be_repeated_one_at_a_time() -> None:
    """A second one before the first has happened is refused, and the first still happens."""
    run = DrilledRun()
    for num_drills in (1, 2):
        run.plan()
        run.drill()
        with pytest.raises(DrillRefusedError, match="a drill is pending"):
            run.drill()
        run.plan(num_steps=2)
        assert run.num_mismatches == num_drills


@pytest.mark.parametrize("mode", [CacheMode.OFF, CacheMode.ON])
def test_a_session_that_does_not_verify_refuses(mode: CacheMode) -> None:
    """It would serve the wrong plan."""
    run = DrilledRun(mode)
    run.plan(num_steps=3)
    with pytest.raises(DrillRefusedError, match="cache mode is not verify"):
        run.drill()
    assert not run.is_pending


def test_a_session_without_a_cached_plan_refuses() -> None:
    """Nothing that could be wrong is there yet; a prefill caches nothing."""
    run = DrilledRun()
    with pytest.raises(DrillRefusedError, match="no cached plan"):
        run.drill()
    assert not run.is_pending


def test_the_capture_says_that_it_was_a_drill_and_replays() -> None:
    """A vector like any other: what was served is what the naive planner makes, what was cached is not."""
    run = DrilledRun()
    run.plan(num_steps=2)
    run.drill()
    run.plan()
    (capture,) = run.mirrored.observer.captures
    assert capture["tags"] == ["capture", "drill"]
    VectorReplay(capture).run()
    capture["ops"][-1]["expect"] = capture["cached"]
    with pytest.raises(AssertionError):
        VectorReplay(capture).run()

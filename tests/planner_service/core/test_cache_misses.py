"""Hits and misses of the plan cache: counted in all, and for each layout as long as it is kept."""

from dataclasses import replace

from planner_service.core.cache_misses import CacheTally
from planner_service.core.layout import PlanLabelRows, StepLayout, Truncate
from planner_service.core.plan import MissReason
from planner_service.messages import CacheMode, SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import pack_rows

OPTIONS = SessionOptions(page_size=4, num_pages=256, max_streams=8, ring_depth=4, cache_mode=CacheMode.ON)
Misses = dict[MissReason, int]


class _Run:
    """A session of two prefilled streams; each step is kept and released at once."""

    def __init__(self, mode: CacheMode = CacheMode.ON) -> None:
        self.session = MirroredSession(replace(OPTIONS, cache_mode=mode))
        self.step_id = 0
        self.plan((0, 5), (1, 6))

    def plan(self, *rows: tuple[int, int]) -> None:
        """Plans rows of (stream, span)."""
        self.step_id += 1
        layout = StepLayout(self.step_id, (self.label(*rows),))
        self.session.send(SessionMessage(layouts=(layout,)))
        self.session.send(SessionMessage(committed_through=self.step_id, released_through=self.step_id))

    @staticmethod
    def label(*rows: tuple[int, int]) -> PlanLabelRows:
        """Returns the plan label of these rows."""
        return pack_rows("main", list(rows))

    def show(self) -> tuple[int, Misses, list[tuple[int, Misses]]]:
        """Returns hits and misses of the session, and of its cached layouts, the last used first."""
        dump = self.session.session.dump()
        entries = [(entry.num_hits, dict(entry.misses)) for entry in dump.cache_entries]
        return dump.summary.num_cache_hits, dict(dump.summary.cache_misses), entries


def test_tally_counts_reasons_that_came_up() -> None:
    """A reason that never came up is not in it."""
    tally = CacheTally()
    for reason in (MissReason.ROWS, MissReason.COLD, MissReason.ROWS):
        tally.count_miss(reason)
    assert tally.misses == {MissReason.ROWS: 2, MissReason.COLD: 1}


def test_misses_are_counted_for_the_session_and_for_their_layout() -> None:
    """What no layout is kept for counts in the session alone; a layout keeps its counts when it is planned anew."""
    run = _Run()
    assert run.show() == (0, {MissReason.NOT_DECODE: 1}, [])
    for _ in range(3):
        run.plan((0, 1), (1, 1))
    run.session.send(SessionMessage(operations=(Truncate(0, 2),)))
    run.plan((0, 1), (1, 1))
    run.plan((0, 1), (1, 1))
    run.plan((1, 1))
    hits, misses, entries = run.show()
    assert hits == 3
    assert misses == {
        MissReason.NOT_DECODE: 1,
        MissReason.COLD: 1,
        MissReason.STREAM_CHANGED: 1,
        MissReason.ROWS: 1,
    }
    assert entries == [
        (0, {MissReason.ROWS: 1}),
        (3, {MissReason.COLD: 1, MissReason.STREAM_CHANGED: 1}),
    ]


def test_verified_plans_count_as_hits() -> None:
    """In the verify mode the cache fares as it would in use."""
    run = _Run(CacheMode.VERIFY)
    for _ in range(4):
        run.plan((0, 1), (1, 1))
    assert run.show() == (3, {MissReason.NOT_DECODE: 1, MissReason.COLD: 1}, [(3, {MissReason.COLD: 1})])


def test_without_a_cache_nothing_is_counted() -> None:
    """A plan from scratch is no miss where there is no cache."""
    run = _Run(CacheMode.OFF)
    run.plan((0, 1), (1, 1))
    assert run.show() == (0, {}, [])

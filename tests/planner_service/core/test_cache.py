"""The decode plan cache: when it hits, why it misses, and that a hit is the plan from scratch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner_service.core import cache
from planner_service.core.layout import Drop, Fork, PlanLabelRows, StepLayout, Truncate
from planner_service.core.planner import Planner
from planner_service.core.ring import BufferSet
from planner_service.messages import CacheMode, PlanReady, PlanSource, SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import pack_int32, pack_rows

OPTIONS = SessionOptions(page_size=4, num_pages=2_048, max_streams=64, ring_depth=16, cache_mode=CacheMode.ON)
AB = (pack_rows("main", [(0, 1), (1, 1)]),)
CD = (pack_rows("main", [(2, 1), (3, 1)]),)


class CachedRun:
    """A session with some streams prefilled, and steps that are committed at once unless they stay in flight."""

    def __init__(self, mode: CacheMode = CacheMode.ON, *, num_streams: int = 4, replies_a_look: int = 1) -> None:
        self.session = MirroredSession(replace(OPTIONS, cache_mode=mode), replies_a_look=replies_a_look)
        self.step_id = 0
        self.plan((pack_rows("main", [(stream, 3 + stream % 4) for stream in range(num_streams)]),))
        self.session.observer.misses.clear()

    def plan(self, plan_labels: tuple[PlanLabelRows, ...], *, is_kept: bool = True, **fields: Any) -> PlanSource:
        """Plans a step; returns how its plan came to be."""
        self.step_id += 1
        layout = replace(StepLayout(self.step_id, plan_labels), **fields)
        (result,) = self.session.send(SessionMessage(layouts=(layout,))).results
        assert isinstance(result, PlanReady)
        if is_kept:
            self.session.send(SessionMessage(committed_through=self.step_id, released_through=self.step_id))
        return result.source

    @property
    def last_miss(self) -> str:
        """The reason of the last miss."""
        return self.session.observer.misses[-1][1]


@pytest.mark.parametrize("num_steps", [13, 30])
@pytest.mark.parametrize(
    "plan_labels",
    [
        AB,
        (pack_rows("main", [(-1, 1), (0, 1), (-1, 1), (3, 1)]), pack_rows("cfg", [(1, 1), (-1, 1), (2, 1)])),
        (pack_rows("main", [(-1, 3), (2, 1)]), pack_rows("pad", [(-1, 1)])),
        (pack_rows("main", [(stream, 1) for stream in range(60)]),),
    ],
)
def test_a_repeated_decode_layout_hits_and_every_plan_is_right(
    plan_labels: tuple[PlanLabelRows, ...], num_steps: int
) -> None:
    """After the first, every step is served from the cache, across page crossings too, equal to the naive plan."""
    run = CachedRun(num_streams=60)
    sources = [run.plan(plan_labels) for _ in range(num_steps)]
    assert sources == [PlanSource.FULL] + [PlanSource.CACHED] * (num_steps - 1)
    assert len(run.session.observer.misses) == 1


def test_crossings_that_are_too_large_to_keep_are_worked_out_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are the same whether or not what a crossing changes is kept from one time to the next."""
    monkeypatch.setattr(cache, "_MAX_CROSSINGS_BYTES", 0)
    run = CachedRun(num_streams=3)
    labels = (pack_rows("main", [(-1, 1), (2, 1), (0, 1)]), pack_rows("cfg", [(1, 1)]))
    built = []
    build_crossing = cache.build_crossing
    monkeypatch.setattr(cache, "build_crossing", lambda *args: built.append(1) or build_crossing(*args))
    sources = [run.plan(labels) for _ in range(14)]
    assert sources == [PlanSource.FULL] + [PlanSource.CACHED] * 13
    assert len(built) == sum((3 + stream + step) % 4 == 0 for step in range(1, 14) for stream in range(3))


def test_steps_in_flight_of_the_same_layout_count_as_its_own() -> None:
    """A run of steps planned ahead hits while none of them is committed."""
    run = CachedRun()
    run.step_id += 1
    layout = StepLayout(run.step_id, AB, repeat=12)
    results = run.session.send(SessionMessage(layouts=(layout,))).results
    sources = [result.source for result in results if isinstance(result, PlanReady)]
    assert sources == [PlanSource.FULL] + [PlanSource.CACHED] * 11


def test_batches_that_alternate_both_hit_and_a_prefill_of_others_evicts_nothing() -> None:
    """Two layouts take turns; a prefill of another stream in between is a miss of its own."""
    run = CachedRun()
    run.plan(AB)
    run.plan(CD)
    assert [run.plan(AB), run.plan(CD)] == [PlanSource.CACHED] * 2
    run.plan((pack_rows("main", [(9, 30)]),))
    assert run.last_miss == "not_decode"
    assert [run.plan(AB), run.plan(CD)] == [PlanSource.CACHED] * 2


def test_the_first_decode_is_a_cold_miss() -> None:
    """Nothing was cached before."""
    run = CachedRun()
    assert run.plan(AB) is PlanSource.FULL
    assert run.last_miss == "cold"


@pytest.mark.parametrize(
    ("plan_labels", "reason"),
    [
        ((pack_rows("main", [(1, 1), (0, 1)]),), "rows"),
        ((pack_rows("main", [(0, 1)]),), "rows"),
        ((pack_rows("main", [(0, 1), (2, 1)]),), "rows"),
        ((pack_rows("other", [(0, 1), (1, 1)]),), "labels"),
        ((pack_rows("main", [(0, 1)]), pack_rows("cfg", [(1, 1)])), "labels"),
        ((pack_rows("main", [(0, 1), (1, 1), (-1, 1)]),), "padding"),
        ((pack_rows("main", [(-1, 1), (0, 1), (1, 1)]),), "padding"),
        ((pack_rows("main", [(0, 1), (1, 2)]),), "not_decode"),
        ((pack_rows("main", [(0, 1), (1, 0)]),), "not_decode"),
    ],
)
def test_another_layout_misses_for_its_reason(plan_labels: tuple[PlanLabelRows, ...], reason: str) -> None:
    """What differs from the layout before is the reason."""
    run = CachedRun()
    run.plan(AB)
    assert run.plan(plan_labels) is PlanSource.FULL
    assert run.last_miss == reason


def test_a_step_that_keeps_nothing_or_forks_misses() -> None:
    """Such steps are planned from scratch, and change the streams they name for the cached layout."""
    run = CachedRun()
    run.plan(AB)
    assert run.plan(AB, commit=False) is PlanSource.FULL
    assert run.last_miss == "not_committing"
    run.plan(AB)
    assert run.plan(AB, forks_before=(Fork(2, 3),)) is PlanSource.FULL
    assert run.last_miss == "fork"


@pytest.mark.parametrize(
    "change",
    [
        SessionMessage(operations=(Truncate(1, 2),)),
        SessionMessage(operations=(Drop(pack_int32([1])),)),
    ],
)
def test_a_changed_stream_misses(change: SessionMessage) -> None:
    """A cut or dropped stream makes the cached plan wrong."""
    run = CachedRun()
    run.plan(AB)
    run.session.send(change)
    assert run.plan(AB) is PlanSource.FULL
    assert run.last_miss == "stream_changed"
    assert run.plan(AB) is PlanSource.CACHED


def test_a_stream_planned_by_another_layout_misses() -> None:
    """A layout that shares one stream with the cached one changes it."""
    run = CachedRun()
    run.plan(AB)
    run.plan((pack_rows("main", [(1, 1), (2, 1)]),))
    assert run.plan(AB) is PlanSource.FULL
    assert run.last_miss == "stream_changed"


def test_a_fork_onto_a_cached_stream_misses_and_one_from_it_does_not() -> None:
    """A fork's source stays as it was; its target does not."""
    run = CachedRun()
    run.plan(AB)
    run.plan((pack_rows("main", [(9, 1)]),), forks_before=(Fork(0, 9),))
    assert run.plan(AB) is PlanSource.CACHED
    run.plan((pack_rows("main", [(9, 1)]),), forks_after=(Fork(9, 0),))
    assert run.plan(AB) is PlanSource.FULL
    assert run.last_miss == "fork"


@pytest.mark.parametrize("num_discarded", [1, 2, 7])
def test_a_layout_that_ran_ahead_and_was_cut_back_misses_once(num_discarded: int) -> None:
    """After a discard the plan starts again from the length before, and then hits."""
    run = CachedRun()
    run.plan(AB)
    for _ in range(num_discarded):
        run.plan(AB, is_kept=False)
    run.session.send(SessionMessage(discard_from=run.step_id - num_discarded + 1))
    assert run.plan(AB) is PlanSource.FULL
    assert run.last_miss == "discarded"
    assert run.plan(AB) is PlanSource.CACHED


def test_a_cached_plan_asks_for_just_the_bytes_it_takes() -> None:
    """As a plan from scratch does: else a ring would grow, or be refused, for one cache mode and not for another."""
    planner = Planner(page_size=2, num_pages=256, max_streams=8, cache_mode=CacheMode.ON)
    sizes = []

    def find_set(num_bytes: int) -> BufferSet:
        sizes.append(num_bytes)
        return BufferSet(1, 0, np.zeros(4_096, dtype=np.int32))

    labels = (pack_rows("main", [(0, 1), (-1, 1), (1, 1)]), pack_rows("cfg", [(2, 1), (3, 1), (4, 1)]))
    plans = [planner.plan(planner.read(StepLayout(step, labels)), step, find_set) for step in range(1, 60)]
    assert [plan.source for plan in plans[1:]] == [PlanSource.CACHED] * 58
    assert sizes == [plan.num_bytes for plan in plans]


def test_cached_steps_add_up_whoever_comes_between() -> None:
    """Two layouts in runs, a prefill, a fork, a discard, a cut: every plan is right, though nobody looks meanwhile."""
    run = CachedRun(replies_a_look=1_000)
    for _ in range(3):
        for labels in (AB, AB, AB, CD, AB, CD, CD):
            for _ in range(6):
                run.plan(labels)
        run.plan((pack_rows("main", [(9, 30)]),))
        run.plan(AB)
        run.plan(CD, forks_before=(Fork(0, 8),))
        for _ in range(5):
            run.plan(AB, is_kept=False)
        run.session.send(SessionMessage(discard_from=run.step_id - 2))
        run.plan(AB)
        for _ in range(6):
            run.plan(CD)
        run.session.send(SessionMessage(operations=(Truncate(1, 7), Drop(pack_int32([8, 9])))))
    assert sum(reason == "discarded" for _, reason in run.session.observer.misses) == 3
    run.session.check()


@pytest.mark.parametrize("ending", [Drop(pack_int32([1])), Truncate(1, 0)])
@pytest.mark.parametrize("num_forks", [1, 2])
def test_a_page_of_a_discarded_fork_is_not_copied_in_the_midst_of_a_run(
    ending: Drop | Truncate, num_forks: int
) -> None:
    """A page shared with a fork that came to nothing is its stream's own at once, though older steps are in flight.

    Else the stream would write its next token to a shared page, and the token after it to a copy, which a cached plan
    knows nothing of.
    """
    run = CachedRun(CacheMode.VERIFY)
    run.plan((pack_rows("main", [(8, 1)]),), is_kept=False)
    run.plan((pack_rows("main", [(5, 4)]),), is_kept=False)
    first_discarded = run.step_id
    run.plan((pack_rows("main", [(8, 1)]),), is_kept=False, forks_before=(Fork(5, 1),) * num_forks)
    run.session.send(SessionMessage(operations=(ending,)))
    run.session.send(SessionMessage(discard_from=first_discarded))
    sources = [run.plan((pack_rows("main", [(5, 1)]),), is_kept=False) for _ in range(6)]
    assert sources == [PlanSource.FULL] + [PlanSource.VERIFIED] * 5
    assert not run.session.observer.mismatches


def test_an_out_of_pages_hit_changes_nothing() -> None:
    """A refused cached step leaves the entry: it hits when pages are there again."""
    session = MirroredSession(replace(OPTIONS, page_size=1, num_pages=5))
    session.send(SessionMessage(layouts=(StepLayout(1, AB, repeat=2), StepLayout(3, AB))))
    assert session.last_answered == 3
    session.send(SessionMessage(layouts=(StepLayout(4, (pack_rows("main", [(-1, 1)]),)),)))
    dump = session.session.dump()
    assert [stream.planned_length for stream in dump.streams] == [2, 2]


def test_verify_serves_the_full_plan_and_finds_no_mismatch() -> None:
    """In verify mode both plans are made; they agree, and the source says so."""
    run = CachedRun(CacheMode.VERIFY)
    sources = [run.plan(AB) for _ in range(12)]
    assert sources == [PlanSource.FULL] + [PlanSource.VERIFIED] * 11
    assert not run.session.observer.mismatches

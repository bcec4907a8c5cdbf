"""Random engines on a real planner: whatever they plan ahead, cut, drop and fork, every row reads its own tokens."""

import json
import random
from collections import deque
from typing import NamedTuple

import pytest

from planner_service.client import (
    CacheMode,
    CombinedLabel,
    ForkRequest,
    Layout,
    OutOfPagesError,
    Plan,
    PlannerClient,
    PlannerSession,
    Segment,
)
from ringplan_cli.conformance.token_pool import TokenPool
from tests.planner_process import PlannerProcess

TIMEOUT_SECONDS = 10.0
PAGE_SIZE = 4
NUM_PAGES = 48
MAX_STREAMS = 12
NUM_TICKS = 200
LABELS = ("main", "cfg")


class _Submitted(NamedTuple):
    """A layout on its way, with what its steps mean for the pool of tokens."""

    steps: range
    layout: Layout
    forks_before: list[ForkRequest]
    forks_after: list[ForkRequest]


class _RandomEngine:
    """Does what an engine may do, at random, and checks every plan that it runs."""

    def __init__(self, session: PlannerSession, seed: int) -> None:
        self._session = session
        self._random = random.Random(seed)
        self._pool = TokenPool(PAGE_SIZE, NUM_PAGES)
        self._submitted: deque[_Submitted] = deque()
        self._requests: list[str] = []
        self._num_requests = 0
        self._held: deque[Plan] = deque()
        self.num_run = 0
        self.num_refused = 0

    def tick(self) -> None:
        """Does one thing."""
        choices = [self._submit] * 4 + [self._run] * 12 + [self._discard, self._drop, self._truncate, self._release]
        self._random.choice(choices)()

    def finish(self) -> None:
        """Runs what is left and drops everything."""
        while self._submitted:
            self._run()
        if self._held:
            self._session.release(self._held.pop().step_id)
        for request in self._requests:
            self._session.drop(request)
        self._session.submit(self._session.build_layout([Segment(None, "main")]))
        plan = self._session.next_plan(TIMEOUT_SECONDS)
        self._session.commit(plan.step_id)
        self._session.release(plan.step_id)
        self._session.flush()

    def _submit(self) -> None:
        if len(self._requests) < MAX_STREAMS // len(LABELS) and self._random.random() < 0.3:
            self._num_requests += 1
            self._requests.append(f"r{self._num_requests}")
        if not self._requests:
            return
        batch = self._random.sample(self._requests, self._random.randint(1, len(self._requests)))
        is_decode = self._random.random() < 0.6
        segments: list[Segment] = []
        for label in self._random.sample(LABELS, self._random.randint(1, len(LABELS))):
            segments += [Segment(request, label, 1 if is_decode else self._random.randint(0, 7)) for request in batch]
            segments += [Segment(None, label)] * self._random.randint(0, 2)
        self._random.shuffle(segments)
        combined = [CombinedLabel("both", LABELS)] if self._random.random() < 0.3 else []
        forks_before, forks_after = self._choose_forks(batch), self._choose_forks(batch)
        commit = self._random.random() < 0.9
        layout = self._session.build_layout(
            segments, combined_labels=combined, commit=commit, forks_before=forks_before, forks_after=forks_after
        )
        repeat = self._random.randint(1, 6) if commit and not layout.has_forks else 1
        steps = self._session.submit(layout, repeat=repeat)
        self._submitted.append(_Submitted(steps, layout, forks_before, forks_after))

    def _choose_forks(self, batch: list[str]) -> list[ForkRequest]:
        if self._random.random() < 0.85:
            return []
        source, target = self._random.sample(LABELS, 2)
        return [ForkRequest(self._random.choice(batch), source, target)]

    def _run(self) -> None:
        if not self._submitted:
            return
        if len(self._held) == self._session.ring_depth:
            self._release()
        try:
            plan = self._session.next_plan(TIMEOUT_SECONDS)
        except OutOfPagesError as error:
            self._advance(error.step_id, error.num_steps)
            self.num_refused += 1
            self._drop()
            return
        submitted = self._advance(plan.step_id, 1)
        self._pool.fork(_list_forks(submitted.forks_before))
        self._pool.copy_pages(plan.page_copies_before)
        assert self._pool.run(plan.labels.values(), keep=submitted.layout.commit) is None
        self._pool.fork(_list_forks(submitted.forks_after))
        self._pool.copy_pages(plan.page_copies_after)
        self._session.commit(plan.step_id)
        self._held.append(plan)
        self.num_run += 1

    def _advance(self, step_id: int, num_steps: int) -> _Submitted:
        """Takes the steps that were answered off; they are the next ones, or something was lost."""
        submitted = self._submitted.popleft()
        assert submitted.steps.start == step_id
        rest = submitted.steps[num_steps:]
        if rest:
            self._submitted.appendleft(submitted._replace(steps=rest))
        return submitted

    def _discard(self) -> None:
        steps = [step for submitted in self._submitted for step in submitted.steps]
        if steps:
            self._discard_from(self._random.choice(steps))

    def _discard_from(self, step_id: int) -> None:
        self._session.discard_from(step_id)
        kept = [entry for entry in self._submitted if entry.steps.start < step_id]
        self._submitted = deque(
            entry._replace(steps=range(entry.steps.start, min(entry.steps.stop, step_id))) for entry in kept
        )

    def _drop(self) -> None:
        """Ends a request as an engine does: what is planned ahead with it will not run."""
        if not self._requests:
            return
        request = self._random.choice(self._requests)
        self._discard_steps_with(request)
        self._session.drop(request)
        self._requests.remove(request)
        for label in LABELS:
            self._pool.drop((request, label))

    def _truncate(self) -> None:
        if not self._requests:
            return
        request, label = self._random.choice(self._requests), self._random.choice(LABELS)
        self._discard_steps_with(request)
        length = self._random.randint(0, self._pool.length((request, label)))
        self._session.truncate(request, label, length)
        self._pool.truncate((request, label), length)

    def _discard_steps_with(self, request: str) -> None:
        for entry in self._submitted:
            if any(key[0] == request for key in entry.layout.streams):
                self._discard_from(entry.steps.start)
                return

    def _release(self) -> None:
        for _ in range(self._random.randint(1, max(1, len(self._held)))):
            if self._held:
                self._session.release(self._held.popleft().step_id)


def _list_forks(forks: list[ForkRequest]) -> list[tuple[tuple[object, str], tuple[object, str]]]:
    return [((fork.request, fork.source), fork.target_key()) for fork in forks]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("ring_depth", "cache_mode"), [(2, CacheMode.OFF), (3, CacheMode.ON), (8, CacheMode.VERIFY)], ids=str
)
def test_every_row_reads_its_own_tokens(
    planner_process: PlannerProcess, ring_depth: int, cache_mode: CacheMode, seed: int
) -> None:
    """Discards, drops, forks and truncations in any order: what is run fits together, and all pages return."""
    with (
        PlannerClient(planner_process.target) as client,
        client.open_session(
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_streams=MAX_STREAMS,
            ring_depth=ring_depth,
            cache_mode=cache_mode,
            set_bytes=256,
            engine_name=json.dumps([ring_depth, cache_mode.name, seed]),
        ) as session,
    ):
        engine = _RandomEngine(session, seed)
        for _ in range(NUM_TICKS):
            engine.tick()
        engine.finish()
        summary = next(other for other in planner_process.list_sessions() if other.session == session.name)
        assert (summary.num_free_pages, summary.num_streams) == (NUM_PAGES - 1, 0)

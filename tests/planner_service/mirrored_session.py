"""A session beside the naive planner: every message goes to both, and everything that comes back is compared."""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from planner_service.core.arrays import ARRAY_NAMES, count_items
from planner_service.core.layout import Drop, StepLayout, StreamOperation, Truncate
from planner_service.core.plan import CaptureDocument, Mismatch
from planner_service.errors import LayoutError, OutOfPagesError, RingTimeoutError
from planner_service.messages import (
    CacheMode,
    PlanFailed,
    PlanReady,
    PlanSource,
    RegionDescription,
    SessionMessage,
    SessionOptions,
    SessionReply,
    WaitKind,
)
from planner_service.session import Session
from tests.reference.kv_simulator import KvSimulator
from tests.reference.naive_planner import Arrays, NaivePlan, NaivePlanner, OutOfPages, unpack_int32

POISON = 0xAB
RING_TIMEOUT_SECONDS = 30.0


class FakeClock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Returns the time in seconds."""
        return self.now


class PlainRegion:
    """A region in ordinary memory, full of a pattern no plan writes."""

    def __init__(self, region_id: int, num_sets: int, set_bytes: int) -> None:
        num_bytes = num_sets * set_bytes
        memory = np.full(num_bytes + 64, POISON, dtype=np.uint8)
        first = -memory.ctypes.data % 64
        self.buffer: npt.NDArray[np.uint8] = memory[first : first + num_bytes]
        self.description = RegionDescription(
            region_id, f"/nowhere/{region_id}", num_bytes, set_bytes, tuple(range(0, num_bytes, set_bytes))
        )
        self.locked_bytes = 0
        self.is_unlinked = False
        self.is_closed = False

    def unlink(self) -> None:
        """Notes that the name is gone."""
        self.is_unlinked = True

    def close(self) -> None:
        """Notes that the memory is gone, and spoils it."""
        self.is_unlinked = True
        self.is_closed = True
        self.buffer[:] = POISON


class RecordingObserver:
    """Keeps what a session tells its observer."""

    def __init__(self) -> None:
        self.published: list[tuple[PlanSource, tuple[str, ...]]] = []
        self.misses: list[tuple[tuple[str, ...], str]] = []
        self.mismatches: list[Mismatch] = []
        self.captures: list[CaptureDocument] = []
        self.failures: list[LayoutError] = []
        self.waits: list[tuple[WaitKind, float]] = []
        self.num_drilled = 0
        self.num_discarded = 0
        self.num_grown = 0

    def plan_published(self, source: PlanSource, plan_labels: Sequence[str], seconds: float) -> None:
        """Keeps the source and the labels."""
        assert seconds >= 0
        self.published.append((source, tuple(plan_labels)))

    def cache_missed(self, plan_labels: Sequence[str], reason: str) -> None:
        """Keeps the reason."""
        self.misses.append((tuple(plan_labels), reason))

    def cache_mismatched(self, mismatch: Mismatch) -> None:
        """Keeps the mismatch."""
        self.mismatches.append(mismatch)

    def mismatch_drilled(self) -> None:
        """Counts."""
        self.num_drilled += 1

    def mismatch_captured(self, capture: CaptureDocument) -> None:
        """Keeps the capture."""
        self.captures.append(capture)

    def layout_failed(self, error: LayoutError) -> None:
        """Keeps the error."""
        self.failures.append(error)

    def ring_waited(self, kind: WaitKind, seconds: float) -> None:
        """Keeps the wait."""
        self.waits.append((kind, seconds))

    def steps_discarded(self, num_steps: int) -> None:
        """Counts."""
        self.num_discarded += num_steps

    def region_grown(self) -> None:
        """Counts."""
        self.num_grown += 1


@dataclass
class _Run:
    layout: StepLayout
    next_step: int
    end_step: int


@dataclass
class _Published:
    """A published plan: what it must be, and the arrays as they stood when its handle came."""

    expected: NaivePlan
    arrays: dict[str, Arrays]
    handle: PlanReady
    content: bytes


class MirroredSession:
    """One session, its naive twin and the engine's KV cache.

    Args:
        options: the session's.
        replies_a_look: after how many replies the session's state is compared with the twin's; plans always are.
    """

    def __init__(self, options: SessionOptions, *, replies_a_look: int = 1) -> None:
        self.options = options
        self._replies_a_look = replies_a_look
        self._num_replies = 0
        self.clock = FakeClock()
        self.observer = RecordingObserver()
        self.regions: dict[int, PlainRegion] = {}
        self.known_regions: set[int] = set()
        self.session = Session(
            "mirrored",
            options,
            self._allocate,
            clock=self.clock,
            ring_timeout_seconds=RING_TIMEOUT_SECONDS,
            observer=self.observer,
        )
        self.naive = NaivePlanner(options.page_size, options.num_pages)
        self.cache = KvSimulator(options.page_size)
        self.queue: deque[_Run | StreamOperation | tuple[str, int]] = deque()
        self.in_flight: dict[int, _Published] = {}
        self.leased: dict[int, _Published] = {}
        self.last_answered = 0
        self.num_results = 0
        self._is_in_parts = False  # every other message is handled in parts
        self._absorb(self.session.open())

    def _allocate(self, region_id: int, num_sets: int, set_bytes: int) -> PlainRegion:
        self.regions[region_id] = PlainRegion(region_id, num_sets, set_bytes)
        return self.regions[region_id]

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits for a set."""
        return bool(self.queue)

    def send(self, message: SessionMessage) -> SessionReply:
        """Sends a message to the session and its twin, and compares what comes back."""
        self._run_steps_through(message.committed_through)
        self.leased = {step: plan for step, plan in self.leased.items() if step > message.released_through}
        if message.committed_through:
            self.queue.append(("commit", message.committed_through))
        if message.discard_from:
            self._discard(message.discard_from)
        self.queue.extend(message.operations)
        for layout in message.layouts:
            self.queue.append(_Run(layout, layout.step_id, layout.step_id + layout.repeat))
        self._is_in_parts = not self._is_in_parts
        reply = self._handle_in_parts(message) if self._is_in_parts else self.session.handle(message)
        self._absorb(reply)
        return reply

    def _handle_in_parts(self, message: SessionMessage) -> SessionReply:
        """Handles a message as the planner does for engines; the parts together are what handling it at once gives."""
        parts = [self.session.handle(message, in_parts=True)]
        while self.session.has_more:
            parts.append(self.session.go_on())
        regions = tuple(region for part in parts for region in part.regions)
        return SessionReply(regions, tuple(result for part in parts for result in part.results))

    def expire(self) -> SessionReply:
        """Lets the ring time-out pass and compares what comes of it."""
        self.clock.now += RING_TIMEOUT_SECONDS
        was_waiting = self.is_waiting
        assert (self.session.deadline is not None) == was_waiting
        reply = self.session.expire()
        assert was_waiting == any(
            isinstance(result, PlanFailed) and isinstance(result.error, RingTimeoutError) for result in reply.results
        )
        self._absorb(reply)
        return reply

    def check_all_is_free(self) -> None:
        """Commits, releases and drops everything; every page must be back, and nothing in flight or leased."""
        while self.is_waiting:
            self.expire()
        message = SessionMessage(
            released_through=self.last_answered,
            committed_through=self.last_answered,
            operations=tuple(Drop(struct.pack("<i", stream)) for stream in range(self.options.max_streams)),
        )
        self.send(message)
        summary = self.session.summarize()
        assert summary.num_free_pages == self.options.num_pages - 1
        assert summary.num_streams == summary.num_steps_in_flight == summary.num_leased_sets == 0
        assert summary.num_shared_pages == 0
        self.session.close()
        assert all(region.is_closed for region in self.regions.values())

    def committed_length(self, stream: int) -> int:
        """Returns a stream's committed length."""
        found = self.naive.streams.get(stream)
        return found.committed_length if found else 0

    def _run_steps_through(self, step_id: int) -> None:
        """The engine runs its plans in order, and then commits them."""
        for step in [step for step in self.in_flight if step <= step_id]:
            plan = self.in_flight.pop(step)
            copies = (plan.handle.page_copies_before, plan.handle.page_copies_after)
            self.cache.run(plan.expected, plan.arrays, *[unpack_pairs(packed) for packed in copies])

    def _discard(self, step_id: int) -> None:
        self.in_flight = {step: plan for step, plan in self.in_flight.items() if step < step_id}
        self.leased = {step: plan for step, plan in self.leased.items() if step < step_id}
        for item in list(self.queue):
            if isinstance(item, _Run):
                item.end_step = min(item.end_step, step_id)
                if item.next_step >= item.end_step:
                    self.queue.remove(item)
        self.queue.append(("discard", step_id))

    def _drain(self) -> None:
        """Applies to the twin what stands before the next step."""
        while self.queue and not isinstance(self.queue[0], _Run):
            item = self.queue.popleft()
            if isinstance(item, Truncate):
                self.naive.truncate(item.stream, item.length)
            elif isinstance(item, Drop):
                for stream in unpack_int32(item.streams):
                    self.naive.drop(stream)
            elif isinstance(item, tuple) and item[0] == "commit":
                self.naive.commit(item[1])
            elif isinstance(item, tuple):
                self.naive.discard_from(item[1])

    def _absorb(self, reply: SessionReply) -> None:
        for description in reply.regions:
            assert description == self.regions[description.region_id].description
            self.known_regions.add(description.region_id)
        for result in reply.results:
            self._drain()
            run = self.queue[0]
            assert isinstance(run, _Run), f"a result for step {result.step_id}, which was not asked for"
            assert result.step_id == run.next_step
            self.num_results += 1
            if isinstance(result, PlanReady):
                self._absorb_plan(run, result)
            else:
                self._absorb_failure(run, result)
        self._drain()
        for published in self.leased.values():
            assert self._content(published.handle) == published.content, "a leased set has changed"
        assert len(self.observer.mismatches) == self.observer.num_drilled
        self._num_replies += 1
        if self._num_replies % self._replies_a_look == 0:
            self.check()

    def _absorb_failure(self, run: _Run, failed: PlanFailed) -> None:
        assert failed.num_steps == run.end_step - run.next_step
        if isinstance(failed.error, OutOfPagesError):
            with pytest.raises(OutOfPages) as refusal:
                self.naive.plan(replace(run.layout, step_id=run.next_step))
            assert failed.error.num_short == refusal.value.num_short
        elif isinstance(failed.error, RingTimeoutError):
            assert len(self.leased) == self.options.ring_depth
            assert failed.error.oldest_step_id == min(self.leased)
        assert any(error is failed.error for error in self.observer.failures)
        self.last_answered = run.end_step - 1
        self.queue.popleft()

    def _absorb_plan(self, run: _Run, handle: PlanReady) -> None:
        step_id = run.next_step
        expected = self.naive.plan(replace(run.layout, step_id=step_id))
        arrays, content = self._read(handle)
        assert arrays == expected.arrays, f"step {step_id}"
        assert unpack_pairs(handle.page_copies_before) == expected.page_copies_before
        assert unpack_pairs(handle.page_copies_after) == expected.page_copies_after
        if self.options.cache_mode is CacheMode.OFF:
            assert handle.source is PlanSource.FULL
        published = _Published(expected, arrays, handle, content)
        self._check_pages_are_nobody_elses(published)
        self.in_flight[step_id] = published
        self.leased[step_id] = published
        self.last_answered = step_id
        run.next_step += 1
        if run.next_step == run.end_step:
            self.queue.popleft()

    def _read(self, handle: PlanReady) -> tuple[dict[str, Arrays], bytes]:
        """Reads a plan as an engine would; its set must be known, large enough, and nobody else's."""
        assert handle.region_id in self.known_regions, f"region {handle.region_id} was not announced"
        region = self.regions[handle.region_id]
        assert not region.is_closed
        assert handle.num_bytes <= region.description.set_bytes
        for other in self.leased.values():
            assert (other.handle.region_id, other.handle.set_index) != (handle.region_id, handle.set_index)
        content = self._content(handle)
        arrays: dict[str, Arrays] = {}
        for extent in handle.extents:
            arrays[extent.name] = {}
            counts = count_items(extent.num_rows, extent.num_tokens, extent.num_indices)
            for name, offset, count in zip(ARRAY_NAMES, extent.offsets, counts, strict=True):
                assert offset % 64 == 0
                assert offset + 4 * count <= handle.num_bytes
                arrays[extent.name][name] = unpack_int32(content[offset : offset + 4 * count])
        return arrays, content

    def _content(self, handle: PlanReady) -> bytes:
        region = self.regions[handle.region_id]
        first = region.description.set_offsets[handle.set_index]
        return region.buffer[first : first + handle.num_bytes].tobytes()

    def _check_pages_are_nobody_elses(self, plan: _Published) -> None:
        """No step in flight names, for another stream, a page that this plan writes."""
        for label, arrays in plan.arrays.items():
            first_token = 0
            for row, owner in enumerate(plan.expected.owners[label]):
                end_token = arrays["qo_indptr"][row + 1]
                slots = arrays["slot_mapping"][first_token:end_token]
                first_token = end_token
                if owner is None:
                    continue
                written = {slot // self.options.page_size for slot in slots}
                for other in self.in_flight.values():
                    for other_owner, pages in other.expected.pages_named(other.arrays):
                        assert other_owner == owner or not written & pages, (
                            f"step {plan.expected.step_id} writes pages {written & pages} of step "
                            f"{other.expected.step_id}"
                        )

    def check(self) -> None:
        """Compares everything the session shows with the twin."""
        self.session.check_integrity()
        dump = self.session.dump()
        assert [lease.step_id for lease in dump.leases] == list(self.leased)
        if self.queue:
            assert len(self.leased) == self.options.ring_depth, "a step waits though a set is free"
            return
        naive = self.naive
        assert dump.summary.num_free_pages == len(naive.free)
        assert dump.summary.num_steps_in_flight == len(naive.in_flight) == len(self.in_flight)
        assert dump.summary.num_shared_pages == sum(count > 1 for count in naive.num_holders.values())
        # Whether a stream that holds nothing exists makes no difference to anyone.
        shown = {
            stream.stream: (stream.committed_length, stream.planned_length, list(stream.pages))
            for stream in dump.streams
            if stream.pages
        }
        assert shown == {
            number: (stream.committed_length, len(stream.tokens), stream.pages)
            for number, stream in sorted(naive.streams.items())
            if stream.pages
        }


def unpack_pairs(packed: bytes) -> list[tuple[int, int]]:
    """Unpacks page copies."""
    return list(struct.iter_unpack("<ii", packed))

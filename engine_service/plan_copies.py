"""Copies of plans to the device: one a step, beside everything else, and fenced at both ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_service.copy_fence import CopyFence, Event
from engine_service.device_plan import ITEM_BYTES, DevicePlan, build_device_arrays
from engine_service.errors import CopyTimeoutError
from engine_service.pinned_memory import PinnedRegions
from planner_service.client import Plan

# While a forward reads one, the next plan is copied to the other.
_NUM_STAGINGS = 2

_logger = logging.getLogger(__name__)


class CopyEngine(Protocol):
    """Copies to a device in a stream of its own, and orders that against the stream of the forward."""

    def allocate(self, num_items: int) -> torch.Tensor:
        """Returns a tensor on the device, int32 [num_items], for copies to go to."""

    def start(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """Starts a copy and returns at once.

        Args:
            source: on the host.
            target: on the device; the same size.
            after: the copy begins after it.

        Returns:
            What comes after the copy.
        """

    def wait(self, event: Event) -> None:
        """Lets the forward's stream wait for an event; the host does not wait."""

    def record(self) -> Event:
        """Returns what comes after all that is in the forward's stream now."""


class CudaCopyEngine:
    """Copies to a GPU; the forward's stream is the current one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotations here.

    def allocate(self, num_items: int) -> torch.Tensor:
        """Returns a tensor on the device; see `CopyEngine`."""
        target = torch.empty(num_items, dtype=torch.int32, device=self._device)
        # Its memory may be what work in the forward's stream still uses: torch hands it out in that stream's order.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        target.record_stream(self._stream)
        return target

    def start(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """Starts a copy; see `CopyEngine`."""
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._record(self._stream)

    def wait(self, event: Event) -> None:
        """Lets the forward's stream wait; see `CopyEngine`."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def record(self) -> Event:
        """Returns what comes after the forward's work; see `CopyEngine`."""
        return self._record(torch.cuda.current_stream(self._device))

    @staticmethod
    def _record(stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotations here.
        event.record(stream)
        return event


@dataclass(slots=True)
class _Staging:
    """Where plans are copied to.

    Args:
        items: int32, on the device.
        read: comes after the last forward that read it; None before the first.
    """

    items: torch.Tensor
    read: Event | None = None


class PlanCopies:
    """Copies each step's plan to the device, its whole run at once. Used by the engine's thread alone.

    Args:
        engine: makes the copies.
        regions: the ring's memory.
        fence: told of every copy from the ring, and holds its release back.
    """

    def __init__(self, engine: CopyEngine, regions: PinnedRegions, fence: CopyFence) -> None:
        self.fence = fence
        self._engine = engine
        self._regions = regions
        self._stagings: list[_Staging] = []
        self._num_copies = 0

    @contextmanager
    def reading(self, plan: Plan) -> Iterator[DevicePlan]:
        """Starts the copy of a plan; the forward that reads it is launched within the `with` block.

        Args:
            plan: the plan; one whose `region_id` is 0 stands in no ring.
        """
        staging = self._find_staging(plan.num_bytes // ITEM_BYTES)
        target = staging.items[: plan.num_bytes // ITEM_BYTES]
        copied = self._engine.start(self._find_source(plan), target, staging.read)
        if plan.region_id:
            self.fence.add(plan.step_id, copied)
        else:
            # Nobody holds its memory back.
            copied.synchronize()
        labels = {name: build_device_arrays(target, arrays) for name, arrays in plan.labels.items()}
        try:
            yield DevicePlan(plan, labels, copied)
        finally:
            staging.read = self._engine.record()

    def wait(self, device_plan: DevicePlan) -> None:
        """Lets whatever is put on the forward's stream from now on wait for a plan's copy; the host does not wait."""
        self._engine.wait(device_plan.copied)

    def note_host_reads(self, device_plan: DevicePlan) -> None:
        """Holds the release of a plan's set back until what is in the forward's stream now has been done.

        For copies from the plan's arrays on the host that an attention backend put there.
        """
        plan = device_plan.plan
        if plan.region_id:
            self.fence.add(plan.step_id, self._engine.record())

    def end_session(self) -> None:
        """Waits until nothing is copied from the ring any more, and unregisters its memory. May be called again."""
        try:
            self.fence.wait_for_all()
        except (CopyTimeoutError, RuntimeError):  # What torch raises when the GPU has failed is a RuntimeError.
            _logger.exception("the ring's memory stays registered with CUDA: a copy from it may still be under way")
            self._regions.abandon()
        else:
            self._regions.close()
        self.fence.clear()

    def _find_source(self, plan: Plan) -> torch.Tensor:
        if not plan.region_id:
            return torch.from_numpy(plan.region_buffer[: plan.num_bytes]).view(torch.int32)
        oldest = self.fence.oldest_step_id
        self._regions.close_before(plan.step_id if oldest is None else oldest)
        start = plan.set_offset // ITEM_BYTES
        return self._regions.find(plan.region_buffer, plan.step_id)[start : start + plan.num_bytes // ITEM_BYTES]

    def _find_staging(self, num_items: int) -> _Staging:
        """Returns where the next plan goes: the one that has not been used for longest, grown if it must be."""
        place = self._num_copies % _NUM_STAGINGS
        self._num_copies += 1
        if place == len(self._stagings):
            self._stagings.append(_Staging(self._engine.allocate(_round_up(num_items))))
        elif num_items > self._stagings[place].items.numel():
            self._stagings[place] = _Staging(self._engine.allocate(_round_up(num_items)))
        return self._stagings[place]


def _round_up(count: int) -> int:
    """Contexts that grow token by token must not make a new tensor every step."""
    return max(1024, 1 << (count - 1).bit_length())

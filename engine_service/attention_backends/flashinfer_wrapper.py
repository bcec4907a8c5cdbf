"""One FlashInfer wrapper with the schedule that stands in its workspace."""

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_service.attention_backends.flashinfer_library import RecordableEvent
from engine_service.attention_backends.flashinfer_schedule import ScheduleKey
from planner_service.client import PlanArrays

# Makes the schedule of a plan label in a wrapper's workspace; its page indices stand on the device.
MakeSchedule = Callable[[Any, PlanArrays, torch.Tensor], None]

# What a wrapper's `run` reads besides its workspace. They have had these names in every release from 0.2 to 0.7.
_INDICES, _LAST_PAGE_LEN = "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
_KNOWN_PARTS = (_INDICES, _LAST_PAGE_LEN, "_plan_info", "_int_workspace_buffer")

_logger = logging.getLogger(__name__)


class ScheduleObserver(Protocol):
    """Counts the schedules of attention calls: one for each plan label and step."""

    def schedule_made(self) -> None:
        """A schedule was made."""

    def schedule_kept(self) -> None:
        """An earlier step's schedule served once more."""

    def schedule_verified(self, *, is_equal: bool) -> None:
        """An earlier step's schedule would have served; a fresh one was made and used, and the two compared."""


class NobodyObserves:
    """Counts nothing; see `ScheduleObserver`."""

    def schedule_made(self) -> None:
        """Does nothing."""

    def schedule_kept(self) -> None:
        """Does nothing."""

    def schedule_verified(self, *, is_equal: bool) -> None:
        """Does nothing."""


class ScheduledWrapper:
    """A FlashInfer wrapper, and what the schedule in its workspace was made for.

    A schedule is written to pinned memory of the wrapper's and copied from there to the device by the current stream,
    which may be far behind. That memory is fenced: it is written again only when the copy has been made.

    Args:
        wrapper: the wrapper.
        make_schedule: calls its `plan`.
        event: an event of its own.
        observer: counts schedules.
        verifies: whether a schedule that could be kept is made again and compared.
    """

    def __init__(
        self,
        wrapper: Any,
        make_schedule: MakeSchedule,
        event: RecordableEvent,
        observer: ScheduleObserver,
        *,
        verifies: bool,
    ) -> None:
        self._wrapper = wrapper
        self._make_schedule = make_schedule
        self._event = event
        self._observer = observer
        self._verifies = verifies
        self._key: ScheduleKey | None = None
        self._has_copied = False
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def is_in_use(self) -> bool:
        """Whether a batch that uses it still exists."""
        return bool(self._users)

    def add_user(self, user: object) -> None:
        """Says that a batch uses it, for as long as the batch exists."""
        self._users.add(user)

    def has_schedule(self, key: ScheduleKey) -> bool:
        """Whether its schedule is the one for `key`, and can be kept."""
        return self._key == key

    def schedule(self, key: ScheduleKey, arrays: PlanArrays, indices: torch.Tensor) -> bool:
        """Sees to it that the workspace holds a plan label's schedule, once the current stream gets there.

        Args:
            key: what the schedule depends on.
            arrays: the plan label.
            indices: its page indices, on the device.

        Returns:
            Whether a schedule was made: then a wrapper in graph mode has the arrays in its buffers, too.
        """
        if not self.has_schedule(key):
            self._make(key, arrays, indices)
            self._observer.schedule_made()
            return True
        if not self._verifies:
            self._observer.schedule_kept()
            return False
        kept = self._read()
        self._make(key, arrays, indices)
        is_equal = _are_equal(kept, self._read())
        if not is_equal:
            _logger.warning(
                "plan label %s: the attention schedule of an earlier step is not the one of this step, which has the "
                "same spans and pages; the fresh one is used",
                arrays.name,
            )
        self._observer.schedule_verified(is_equal=is_equal)
        return True

    def run(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> torch.Tensor:
        """Computes attention by the schedule that the workspace holds.

        Args:
            query: [num_tokens, num_heads, head_dim].
            pages: one layer of the cache.
            scale: what scores are multiplied by.
            indices: the plan label's page indices, on the device.
            last_page_len: tokens in each row's last page, on the device.
        """
        if self._key is not None:
            # A schedule that was kept came with another step's pages.
            setattr(self._wrapper, _INDICES, indices)
            setattr(self._wrapper, _LAST_PAGE_LEN, last_page_len)
        # Schedules are made with the scale 1; this is the factor on it that a call can give, and any layer its own.
        output: torch.Tensor = self._wrapper.run(query, pages, q_scale=scale)
        return output

    def find_layout(self) -> tuple[int, ...]:
        """Returns how the schedule is laid out in the workspace: what a captured graph holds on to."""
        return tuple(map(int, getattr(self._wrapper, "_plan_info", None) or ()))

    def _read(self) -> tuple[tuple[int, ...], torch.Tensor]:
        """Returns the layout of the workspace and a copy of all that stands there."""
        return self.find_layout(), self._wrapper._int_workspace_buffer.clone()

    def _make(self, key: ScheduleKey, arrays: PlanArrays, indices: torch.Tensor) -> None:
        self._key = None
        if self._has_copied:
            self._event.synchronize()
        self._has_copied = True
        try:
            self._make_schedule(self._wrapper, arrays, indices)
        finally:
            self._event.record()
        # With other parts than the known ones a schedule cannot be kept, nor be looked at: each step has its own.
        if all(hasattr(self._wrapper, part) for part in _KNOWN_PARTS):
            self._key = key


def copy_to_host(values: npt.NDArray[np.int32]) -> torch.Tensor:
    """Returns a copy of a plan's array in memory that is not pinned.

    FlashInfer copies such arrays to the device without waiting. From the ring, which is pinned, that would be done some
    time later, when the buffer set may hold another plan; from here it is done before `plan` returns.

    Args:
        values: int32.

    Source: cudaMemcpyAsync in "API synchronization behavior" of the CUDA runtime API.
    """
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _are_equal(one: tuple[tuple[int, ...], torch.Tensor], other: tuple[tuple[int, ...], torch.Tensor]) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])

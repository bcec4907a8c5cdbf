"""The wrappers of one kind: a schedule that serves again is found, and one that is still needed is left alone."""

from collections.abc import Callable

from engine_service.attention_backends.flashinfer_schedule import ScheduleKey
from engine_service.attention_backends.flashinfer_wrapper import ScheduledWrapper

# Two take turns, so that the next schedule need not wait until the copy of the last one has been made.
MIN_WRAPPERS = 2


class WrapperPool:
    """Hands out wrappers, the least recently used first.

    Args:
        open_wrapper: makes one; each takes 8 MiB on the device and 8 MiB of pinned memory.
    """

    def __init__(self, open_wrapper: Callable[[], ScheduledWrapper]) -> None:
        self._open_wrapper = open_wrapper
        self._wrappers: list[ScheduledWrapper] = []

    def find(self, key: ScheduleKey) -> ScheduledWrapper:
        """Returns a wrapper that has a schedule already, or else one whose schedule no batch needs any more."""
        found = next((one for one in self._wrappers if one.has_schedule(key)), None)
        if found is None and len(self._wrappers) >= MIN_WRAPPERS:
            found = next((one for one in self._wrappers if not one.is_in_use), None)
        if found is None:
            found = self._open_wrapper()
        else:
            self._wrappers.remove(found)
        self._wrappers.append(found)
        return found

"""The numbers that stand for streams on the wire: small, unique in their session, used again after a drop."""

from collections.abc import Hashable, Iterable

from planner_service.errors import InvalidLayoutError

StreamKey = tuple[Hashable, str]  # (request, label)


class StreamNumbers:
    """Gives every (request, label) of a session its stream number, and takes the numbers back when it is dropped."""

    def __init__(self, max_streams: int) -> None:
        self.num_drops = 0
        self._max_streams = max_streams
        self._by_key: dict[StreamKey, int] = {}
        self._keys_by_request: dict[Hashable, list[StreamKey]] = {}
        self._free: list[int] = []
        self._num_ever = 0

    def find(self, key: StreamKey) -> int | None:
        """Returns the number of a (request, label), or None if it has none."""
        return self._by_key.get(key)

    def assign(self, keys: Iterable[StreamKey]) -> dict[StreamKey, int]:
        """Returns the numbers of `keys`; those without one get one, in order.

        Raises:
            InvalidLayoutError: there are not enough numbers; none has been given.
        """
        by_key = self._by_key
        keys = list(keys)
        new = list(dict.fromkeys([key for key in keys if key not in by_key]))
        num_left = self._max_streams - self._num_ever + len(self._free)
        if len(new) > num_left:
            raise InvalidLayoutError(
                f"{len(new)} new streams are needed and {num_left} of max_streams {self._max_streams} are left"
            )
        for key in new:
            self._give(key)
        return {key: by_key[key] for key in keys}

    def drop(self, request: Hashable) -> list[int]:
        """Takes back a request's numbers, and returns them in the order of their labels' first use."""
        numbers = [self._by_key.pop(key) for key in self._keys_by_request.pop(request, ())]
        if numbers:
            self.num_drops += 1
            self._free.extend(reversed(numbers))
        return numbers

    def _give(self, key: StreamKey) -> None:
        if self._free:
            number = self._free.pop()
        else:
            number = self._num_ever
            self._num_ever += 1
        self._by_key[key] = number
        self._keys_by_request.setdefault(key[0], []).append(key)

"""Copies on the CPU that are made as late as a test wants, with the order of streams and events that a GPU has."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine_service.copy_fence import CopyFence, Event
from engine_service.pinned_memory import PinnedRegions
from engine_service.plan_copies import PlanCopies


def sum_up(items: torch.Tensor) -> int:
    """Returns a checksum."""
    return zlib.crc32(items.numpy().tobytes())


@dataclass(eq=False)
class HeldEvent:
    """What comes after a copy.

    Args:
        make: makes the copy, and those before it.
        num_held_queries: how often it is asked for in vain before the copy is made; None: for ever.
    """

    make: Callable[[], None]
    num_held_queries: int | None
    is_made: bool = False
    num_queries: int = 0

    def query(self) -> bool:
        """Whether the copy has been made."""
        self.num_queries += 1
        if self.num_held_queries is not None and self.num_queries > self.num_held_queries:
            self.synchronize()
        return self.is_made

    def synchronize(self) -> None:
        """Makes the copy."""
        if not self.is_made:
            self.is_made = True
            self.make()


@dataclass(eq=False)
class StreamEvent:
    """What comes after a forward that waits for copies."""

    waited: list[HeldEvent]

    def query(self) -> bool:
        """Whether the copies have been made; a forward takes no time here."""
        return all(event.is_made for event in self.waited)

    def synchronize(self) -> None:
        """Makes the copies."""
        for event in self.waited:
            event.synchronize()


@dataclass
class HeldCopyEngine:
    """A copy engine whose copies are made when they are looked for often enough, or when a forward needs them.

    Args:
        num_held_queries: how often a copy's event is asked for in vain; None: for ever.
        is_read: whether forwards read what is copied: then a copy is made when the forward waits for it.

    Attributes:
        events: the events of the copies, oldest first.
        sizes: the elements of each copy.
        afters: what each copy comes after.
        recorded: the events of the forward's stream, oldest first.
        num_allocated: stagings made.
        num_rewritten: copies whose source was no longer what it had been when the copy was started.
    """

    num_held_queries: int | None = 0
    is_read: bool = True
    events: list[HeldEvent] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    afters: list[Event | None] = field(default_factory=list)
    recorded: list[StreamEvent] = field(default_factory=list)
    num_allocated: int = 0
    num_rewritten: int = 0
    _waited: list[HeldEvent] = field(default_factory=list)

    def allocate(self, num_items: int) -> torch.Tensor:
        """Returns memory whose content no plan has."""
        self.num_allocated += 1
        return torch.full((num_items,), -(1 << 30), dtype=torch.int32)

    def start(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> HeldEvent:
        """Notes what is to be copied, and what stands there now."""
        checksum = sum_up(source)
        earlier = list(self.events)

        def make() -> None:
            for event in earlier:
                event.synchronize()
            if after is not None:
                after.synchronize()
            self.num_rewritten += sum_up(source) != checksum
            target.copy_(source)

        assert source.shape == target.shape
        self.sizes.append(source.numel())
        self.afters.append(after)
        self.events.append(HeldEvent(make, self.num_held_queries))
        return self.events[-1]

    def wait(self, event: Event) -> None:
        """Makes the copy, or notes that the forward's stream waits for it."""
        assert isinstance(event, HeldEvent)
        self._waited.append(event)
        if self.is_read:
            event.synchronize()

    def record(self) -> StreamEvent:
        """Returns what is complete once every copy that the forward's stream waits for has been made."""
        self.recorded.append(StreamEvent([event for event in self._waited if not event.is_made]))
        return self.recorded[-1]


def build_held_copies(engine: HeldCopyEngine, *, timeout_seconds: float = 20.0) -> PlanCopies:
    """Returns copies of plans through an engine of this module, from memory that is not registered."""
    return PlanCopies(engine, PinnedRegions(None, lambda _is_pinned: None), CopyFence(timeout_seconds))

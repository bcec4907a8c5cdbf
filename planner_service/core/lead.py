"""What a run of cached steps adds to its streams, counted instead of written down at each step."""

from dataclasses import dataclass, field

import numpy as np

from planner_service.core.layout import Int64Array
from planner_service.core.page_tables import IntArray

_ONE = np.intp(1)


@dataclass(slots=True)
class Lead:
    """What cached steps of one layout have added to its streams, where the columns do not have it yet.

    Args:
        streams: the layout's streams, all different, intp [n].
        length_identities: theirs, int64 [n]; the array itself tells the layout from others.

    Attributes:
        num_planned: tokens planned for each stream.
        num_committed: tokens committed of each; these may have been planned before.
        last_step: the last step.
    """

    streams: IntArray
    length_identities: Int64Array
    num_planned: int = 0
    num_committed: int = 0
    last_step: int = 0


@dataclass(slots=True)
class Growth:
    """Streams that are given one page each, time and again, at the same steps of a cached layout.

    Args:
        streams: in the order in which they are given pages, all different, intp [n].

    Attributes:
        places: where in the arena the next page of each stands, intp [n]; right while no table is moved.
        num_left: for how many more times there is room at these places.
        num_moves: `PageTables.num_moves` when the places were found.
        num_unwritten: pages given to each stream that `PageTables.num_held` does not count yet.
    """

    streams: IntArray
    places: IntArray = field(init=False)
    num_left: int = 0
    num_moves: int = 0
    num_unwritten: int = 0

    def add(self, num_pages: int) -> None:
        """Counts pages given to each stream, or taken back from it."""
        self.places += _ONE if num_pages == 1 else np.intp(num_pages)
        self.num_left -= num_pages
        self.num_unwritten += num_pages

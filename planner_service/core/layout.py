"""What an engine asks for: step layouts and changes to streams, as plain values."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
PADDING = -1


@dataclass(frozen=True, slots=True)
class PlanLabelRows:
    """The rows of one plan label, as they came over the wire.

    Args:
        name: the plan label.
        streams: packed little-endian int32, one a row; `PADDING` (-1) is a padding row.
        spans: packed little-endian int32, one a row; empty means that every span is 1.
    """

    name: str
    streams: bytes
    spans: bytes = b""


@dataclass(frozen=True, slots=True)
class Fork:
    """Makes `target` equal to `source` (stream numbers)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Everything needed to plan one forward, or `repeat` equal ones with ids from `step_id` on.

    `page_order` is the order in which rows are given pages: packed little-endian int32, rows counted over all plan
    labels; empty is the order of the rows themselves.
    """

    step_id: int
    plan_labels: tuple[PlanLabelRows, ...]
    commit: bool = True
    repeat: int = 1
    forks_before: tuple[Fork, ...] = ()
    forks_after: tuple[Fork, ...] = ()
    page_order: bytes = b""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cuts `stream` back to its first `length` tokens."""

    stream: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Ends streams: packed little-endian int32."""

    streams: bytes


StreamOperation = Truncate | Drop

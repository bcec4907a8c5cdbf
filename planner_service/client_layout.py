"""Step layouts as an engine describes them: ordered segments, grouped into plan labels and packed for the wire."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner_service.client_numbers import StreamKey, StreamNumbers
from planner_service.core.layout import PADDING
from planner_service.errors import InvalidLayoutError
from ringplan.planner.v1 import planner_pb2

MAX_SPAN = 2**31 - 1
MAX_LABEL_CHARACTERS = 64

RowKeys = tuple[StreamKey | None, ...]


class Segment(NamedTuple):
    """The query tokens that one request adds to one label.

    Args:
        request: the request, or None for a padding row under `label`.
        label: the KV sequence.
        span: query tokens; 0 reads only, a padding row has at least 1.
    """

    request: Hashable | None
    label: str
    span: int = 1


class ForkRequest(NamedTuple):
    """Makes one label of a request equal to another label, of the same request unless `target_request` is given."""

    request: Hashable
    source: str
    target: str
    target_request: Hashable | None = None

    def target_key(self) -> StreamKey:
        """Returns the (request, label) that becomes equal to the source."""
        return (self.request if self.target_request is None else self.target_request, self.target)


class CombinedLabel(NamedTuple):
    """A plan label that covers several labels, `sources`, in their order."""

    name: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayoutLabel:
    """One plan label of a layout.

    Args:
        name: the plan label.
        rows: the (request, label) of each row in order; None is a padding row.
        spans: the span of each row.
    """

    name: str
    rows: RowKeys
    spans: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Layout:
    """A packed step layout; submit it as often as the batch stays the same.

    Args:
        labels: its plan labels in order.
        commit: whether the steps' tokens are kept.
        message: the wire form; step id and repeat are filled in when it is submitted.
        streams: the number of every stream it names, by (request, label).
        numbers: where they come from: a layout belongs to one session.
        num_drops: how many drops there had been when the numbers were last known to be right.
    """

    labels: tuple[LayoutLabel, ...]
    commit: bool
    message: planner_pb2.StepLayout
    streams: dict[StreamKey, int]
    numbers: StreamNumbers
    num_drops: int

    @property
    def num_tokens(self) -> int:
        """Query tokens over all plan labels."""
        return sum(sum(label.spans) for label in self.labels)

    @property
    def has_forks(self) -> bool:
        """Whether the layout forks streams."""
        return bool(self.message.forks_before or self.message.forks_after)

    def check_streams(self, numbers: StreamNumbers) -> None:
        """Sees to it that every number still means the stream it meant when the layout was built.

        Args:
            numbers: those of the session that is to plan the layout.

        Raises:
            InvalidLayoutError: the layout is another session's, or a request in it has been dropped since.
        """
        if numbers is not self.numbers:
            raise InvalidLayoutError("the layout was built by another session")
        if self.num_drops != numbers.num_drops:
            for key, number in self.streams.items():
                if numbers.find(key) != number:
                    raise InvalidLayoutError(f"request {key[0]!r} has been dropped since the layout was built", number)
            self.num_drops = numbers.num_drops


def build_layout(
    numbers: StreamNumbers,
    segments: Iterable[Segment],
    *,
    combined_labels: Sequence[CombinedLabel] = (),
    commit: bool = True,
    forks_before: Sequence[ForkRequest] = (),
    forks_after: Sequence[ForkRequest] = (),
) -> Layout:
    """Groups segments into plan labels and packs them.

    Plan labels: the combined ones first, in the order given and where they have rows, then the others as they first
    appear in the segments. A combined one holds its sources' rows source by source, each source's in batch order.
    Whatever the grouping, rows get their pages in batch order.

    Args:
        numbers: where streams without a number get one.
        segments: the step's rows in batch order.
        combined_labels: labels that are planned together.
        commit: whether the step's tokens are kept when it is committed.
        forks_before: forks that this step's rows see, applied in order.
        forks_after: forks that later steps see, applied in order.

    Returns:
        The layout.

    Raises:
        InvalidLayoutError: a rule is broken; no stream has got a number.
    """
    segments = list(segments)
    places_by_label = _group_by_label(segments)
    spans = [segment[2] for segment in segments]
    _check_spans(segments, spans)
    rows: list[StreamKey | None] = [None if request is None else (request, label) for request, label, _ in segments]
    keys = [key for key in rows if key is not None]
    _check_once(keys)
    for fork in (*forks_before, *forks_after):
        keys.extend(_check_fork(fork))
    groups = list(_group_into_plan_labels(places_by_label, combined_labels))
    streams = numbers.assign(keys)
    labels = tuple(
        [
            LayoutLabel(name, tuple([rows[place] for place in places]), tuple([spans[place] for place in places]))
            for name, places in groups
        ]
    )
    message = planner_pb2.StepLayout(
        commit=commit,
        plan_labels=[_pack_plan_label(label, streams) for label in labels],
        forks_before=[_pack_fork(fork, streams) for fork in forks_before],
        forks_after=[_pack_fork(fork, streams) for fork in forks_after],
        # One label's rows are in batch order, and most layouts have one label.
        page_order=b"" if len(places_by_label) == 1 else _pack_page_order(groups),
    )
    return Layout(labels, commit, message, streams, numbers, numbers.num_drops)


def _group_by_label(segments: Sequence[Segment]) -> dict[str, list[int]]:
    """Returns the places in the batch of each label's segments."""
    places_by_label: dict[str, list[int]] = {}
    for place, segment in enumerate(segments):
        places = places_by_label.get(segment[1])
        if places is None:
            _check_label(segment[1])
            places = places_by_label[segment[1]] = []
        places.append(place)
    if not places_by_label:
        raise InvalidLayoutError("a layout needs at least one segment")
    return places_by_label


def _check_spans(segments: Sequence[Segment], spans: Sequence[int]) -> None:
    if set(map(type, spans)) == {int} and min(spans) >= 1 and max(spans) <= MAX_SPAN:
        return
    for request, label, span in segments:
        lowest = 1 if request is None else 0
        if not (type(span) is int and lowest <= span <= MAX_SPAN):
            row = "a padding row" if request is None else f"request {request!r}"
            raise InvalidLayoutError(f"{row} under {label!r} has span {span!r}: {lowest}..{MAX_SPAN} is allowed")


def _check_once(keys: Sequence[StreamKey]) -> None:
    if len(set(keys)) != len(keys):
        request, label = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise InvalidLayoutError(f"request {request!r} has two segments under {label!r}: one row a stream is allowed")


def _check_fork(fork: ForkRequest) -> tuple[StreamKey, StreamKey]:
    source, target = (fork.request, fork.source), fork.target_key()
    for request, label in (source, target):
        _check_label(label)
        if request is None:
            raise InvalidLayoutError("a fork names its request: None is allowed for padding rows alone")
    if source == target:
        raise InvalidLayoutError(f"request {fork.request!r} forks {fork.source!r} onto itself")
    return source, target


def _check_label(label: str) -> None:
    if not (0 < len(label) <= MAX_LABEL_CHARACTERS and is_unicode(label)):
        raise InvalidLayoutError(f"label {label!r}: 1 to {MAX_LABEL_CHARACTERS} characters of Unicode are allowed")


def _group_into_plan_labels(
    places_by_label: dict[str, list[int]], combined_labels: Sequence[CombinedLabel]
) -> Iterator[tuple[str, list[int]]]:
    """Yields each plan label with the places in the batch of its rows, in row order."""
    taken: set[str] = set()
    names: set[str] = set()
    for name, sources in combined_labels:
        _check_label(name)
        for source in sources:
            if source in taken:
                raise InvalidLayoutError(f"label {source!r} is combined twice")
            taken.add(source)
        if name in names:
            raise InvalidLayoutError(f"two combined labels are named {name!r}")
        names.add(name)
        places = [place for source in sources for place in places_by_label.get(source, ())]
        if places:
            yield name, places
    for label, places in places_by_label.items():
        if label not in taken:
            if label in names:
                raise InvalidLayoutError(f"label {label!r} has rows of its own and names a combined label too")
            yield label, places


def _pack_page_order(groups: Sequence[tuple[str, list[int]]]) -> bytes:
    """Returns the rows in batch order, packed; nothing where they are in batch order themselves.

    Args:
        groups: each plan label with the places in the batch of its rows.
    """
    places = [place for _, places_of_label in groups for place in places_of_label]
    if places == list(range(len(places))):
        return b""
    rows = [0] * len(places)
    for row, place in enumerate(places):
        rows[place] = row
    return pack_int32(rows)


def _pack_plan_label(label: LayoutLabel, streams: dict[StreamKey, int]) -> planner_pb2.PlanLabel:
    row_streams = [PADDING if key is None else streams[key] for key in label.rows]
    is_decode = label.spans.count(1) == len(label.spans)
    return planner_pb2.PlanLabel(
        name=label.name, streams=pack_int32(row_streams), spans=b"" if is_decode else pack_int32(label.spans)
    )


def _pack_fork(fork: ForkRequest, streams: dict[StreamKey, int]) -> planner_pb2.Fork:
    return planner_pb2.Fork(source=streams[fork.request, fork.source], target=streams[fork.target_key()])


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogates, which no message can carry."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def pack_int32(values: Sequence[int]) -> bytes:
    """Returns `values` as packed little-endian int32."""
    return np.array(values, dtype="<i4").tobytes()

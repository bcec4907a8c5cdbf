"""A planner as plain as can be: one row at a time, lists and deques, written from the design alone.

It is the independent source of expected values for the planner's tests. Nothing of the planner is imported but the
plain values that name a layout. Beside lengths it keeps what each stream holds, one made-up token id a token, so a
`KvSimulator` can tell whether a plan reads the right tokens.
"""

import copy
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner_service.core.layout import PADDING, Fork, PlanLabelRows, StepLayout

SINK_PAGE = 0
Arrays = dict[str, list[int]]


class OutOfPages(Exception):  # noqa: N818 - the wire's word for it
    """Raised when the pool has fewer free pages than a step needs."""

    def __init__(self, num_short: int) -> None:
        super().__init__(f"{num_short} pages short")
        self.num_short = num_short


@dataclass(eq=False)
class NaiveStream:
    """One stream, or what it was before a fork replaced it.

    Attributes:
        pages: its pages in order; there may be more than its length needs.
        tokens: what it holds once every planned step has run.
        pending: (step id, tokens) for each step in flight whose commit keeps tokens.
        forked_by: the step in flight that made it by a fork, or 0.
        made_by: the step that made it by a fork, or 0.
        identity: tells it from every other, also from those before and after it under its number.
    """

    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    forked_by: int = 0
    made_by: int = 0
    identity: int = 0

    @property
    def committed_length(self) -> int:
        """Tokens of committed steps."""
        return 0 if self.forked_by else len(self.tokens) - sum(count for _, count in self.pending)


@dataclass(eq=False)
class NaivePlan:
    """One step's plan.

    Attributes:
        arrays: plan label -> array name -> values.
        page_copies_before: (source page, target page).
        page_copies_after: the same, after the step.
        written: plan label -> for each row, the token ids it writes.
        held: plan label -> for each row, the token ids its pages must hold after it wrote; None for a padding row.
        owners: plan label -> for each row, the identity of its stream; None for a padding row.
    """

    step_id: int
    arrays: dict[str, Arrays] = field(default_factory=dict)
    page_copies_before: list[tuple[int, int]] = field(default_factory=list)
    page_copies_after: list[tuple[int, int]] = field(default_factory=list)
    written: dict[str, list[list[int]]] = field(default_factory=dict)
    held: dict[str, list[list[int] | None]] = field(default_factory=dict)
    owners: dict[str, list[int | None]] = field(default_factory=dict)

    def pages_named(self, arrays: dict[str, Arrays]) -> list[tuple[int, set[int]]]:
        """Returns the identity of each stream row's stream, and the pages that `arrays` give the row."""
        named = []
        for label, owners in self.owners.items():
            indptr, indices = arrays[label]["paged_kv_indptr"], arrays[label]["paged_kv_indices"]
            rows = zip(owners, indptr, indptr[1:], strict=False)
            named += [(owner, set(indices[first:end])) for owner, first, end in rows if owner is not None]
        return named


@dataclass(eq=False)
class _Step:
    """A step in flight: which streams it named, and what its end gives up or takes back."""

    step_id: int
    named: list[NaiveStream] = field(default_factory=list)
    # (target number, what it was, what the fork made of it, whether after the step), in the order made
    forks: list[tuple[int, NaiveStream | None, NaiveStream, bool]] = field(default_factory=list)
    # What last named a fork's target before this step: by the identity the fork gave it.
    last_named: dict[int, int] = field(default_factory=dict)
    # (stream, shared page before, own page after, place in its table), in the order made
    copied_pages: list[tuple[NaiveStream, int, int, int]] = field(default_factory=list)


class NaivePlanner:
    """Plans steps one row at a time.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.free: deque[int] = deque(range(1, num_pages))
        self.num_holders: dict[int, int] = {}
        self.streams: dict[int, NaiveStream] = {}
        self.in_flight: list[_Step] = []
        # (freed once no step from the first to the second of these is in flight, pages in order)
        self.given_up: list[tuple[int, int, list[int]]] = []
        self.last_named: dict[int, int] = {}  # the last step that named a stream's number
        self.num_tokens_made = 0
        self.num_streams_made = 0

    # ---- pages

    def _take_page(self) -> int:
        page = self.free.popleft()
        self.num_holders[page] = 1
        return page

    def _free_pages(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.num_holders[page] -= 1
            if self.num_holders[page] == 0:
                del self.num_holders[page]
                self.free.append(page)

    def _give_up(self, pages: list[int], made_by: int, last: int) -> None:
        """Frees pages once no step in flight from `made_by` up to `last` remains."""
        if self._is_named(made_by, last):
            self.given_up.append((made_by, last, list(pages)))
        else:
            self._free_pages(pages)

    def _is_named(self, made_by: int, last: int) -> bool:
        return any(made_by <= step.step_id <= last for step in self.in_flight)

    def _free_given_up(self) -> None:
        for made_by, last, pages in self.given_up:
            if not self._is_named(made_by, last):
                self._free_pages(pages)
        self.given_up = [entry for entry in self.given_up if self._is_named(*entry[:2])]

    # ---- planning

    def plan(self, layout: StepLayout) -> NaivePlan:
        """Plans one step (`repeat` is not looked at).

        Raises:
            OutOfPages: there are too few free pages; nothing has changed.
        """
        most = sum(span + 1 for rows in layout.plan_labels for _, span in unpack_rows(rows))
        most += len(layout.forks_before) + len(layout.forks_after)
        if most <= len(self.free):
            return self._plan(layout)
        before = copy.deepcopy(self.__dict__)
        # Pages beyond the pool stand in for the missing ones, so that all of them are counted.
        self.free.extend(range(self.num_pages, self.num_pages + most))
        plan = self._plan(layout)
        num_missing = most - sum(page >= self.num_pages for page in self.free)
        if num_missing:
            self.__dict__ = before
            raise OutOfPages(num_missing)
        self.free = deque(page for page in self.free if page < self.num_pages)
        return plan

    def _plan(self, layout: StepLayout) -> NaivePlan:
        plan = NaivePlan(layout.step_id)
        step = _Step(layout.step_id)
        self.in_flight.append(step)
        for fork in layout.forks_before:
            plan.page_copies_before += self._fork(step, fork, is_after=False)
        all_rows = [row for rows in layout.plan_labels for row in unpack_rows(rows)]
        for number, span in all_rows:
            plan.page_copies_before += self._copy_shared_pages(step, self.streams.get(number, NaiveStream()), span)
        for place in unpack_int32(layout.page_order) or range(len(all_rows)):
            number, span = all_rows[place]
            if number != PADDING:
                if number not in self.streams:
                    self.streams[number] = self._make_stream()
                self._reserve(self.streams[number], span)
        for rows in layout.plan_labels:
            arrays = empty_arrays()
            plan.arrays[rows.name] = arrays
            plan.written[rows.name] = []
            plan.held[rows.name] = []
            plan.owners[rows.name] = []
            for number, span in unpack_rows(rows):
                if number == PADDING:
                    append_padding_row(arrays, self.page_size, span)
                    plan.written[rows.name].append([])
                    plan.held[rows.name].append(None)
                    plan.owners[rows.name].append(None)
                    continue
                stream = self.streams[number]
                step.named.append(stream)
                append_row(arrays, self.page_size, stream.pages, len(stream.tokens), span)
                new = list(range(self.num_tokens_made, self.num_tokens_made + span))
                self.num_tokens_made += span
                plan.written[rows.name].append(new)
                plan.held[rows.name].append(stream.tokens + new)
                plan.owners[rows.name].append(stream.identity)
                if layout.commit:
                    stream.tokens = stream.tokens + new
                    stream.pending.append((layout.step_id, span))
        for fork in layout.forks_after:
            plan.page_copies_after += self._fork(step, fork, is_after=True)
        forks = (*layout.forks_before, *layout.forks_after)
        for number in [number for number, _ in all_rows] + [
            end for fork in forks for end in (fork.source, fork.target)
        ]:
            self.last_named[number] = step.step_id
        return plan

    def _make_stream(self) -> NaiveStream:
        self.num_streams_made += 1
        return NaiveStream(identity=self.num_streams_made)

    def _copy_shared_pages(self, step: _Step, stream: NaiveStream, span: int) -> list[tuple[int, int]]:
        """Gives a row that would write into a shared, partly filled page one of its own; returns the page copy."""
        place, num_in_page = divmod(len(stream.tokens), self.page_size)
        if not span or not num_in_page or self.num_holders[stream.pages[place]] == 1:
            return []
        shared, stream.pages[place] = stream.pages[place], self._take_page()
        step.copied_pages.append((stream, shared, stream.pages[place], place))
        return [(shared, stream.pages[place])]

    def _reserve(self, stream: NaiveStream, span: int) -> None:
        """Makes room for `span` more tokens."""
        while len(stream.pages) * self.page_size < len(stream.tokens) + span:
            stream.pages.append(self._take_page())

    def _fork(self, step: _Step, fork: Fork, *, is_after: bool) -> list[tuple[int, int]]:
        """Makes one stream equal to another; returns the page copy it needs."""
        source = self.streams.get(fork.source, NaiveStream())
        old = self.streams.get(fork.target)
        num_full = len(source.tokens) // self.page_size
        target = self._make_stream()
        target.pages, target.tokens = source.pages[:num_full], list(source.tokens)
        target.forked_by = target.made_by = step.step_id
        for page in target.pages:
            self.num_holders[page] += 1
        copies = []
        if len(source.tokens) % self.page_size:
            target.pages.append(self._take_page())
            copies.append((source.pages[num_full], target.pages[num_full]))
        self.streams[fork.target] = target
        step.forks.append((fork.target, old, target, is_after))
        step.last_named[target.identity] = self.last_named.get(fork.target, 0)
        return copies

    # ---- the end of a step

    def commit(self, step_id: int) -> None:
        """The steps in flight up to `step_id` have run."""
        while self.in_flight and self.in_flight[0].step_id <= step_id:
            step = self.in_flight.pop(0)
            for stream in step.named:
                stream.pending = [entry for entry in stream.pending if entry[0] != step.step_id]
            for _, shared, _, _ in step.copied_pages:
                self._free_pages([shared])
            for _, old, new, _ in step.forks:
                if new.forked_by == step.step_id:
                    new.forked_by = 0
                if old is not None:
                    self._free_pages(old.pages)
        self._free_given_up()

    def discard_from(self, step_id: int) -> None:
        """The steps in flight from `step_id` on will not run."""
        while self.in_flight and self.in_flight[-1].step_id >= step_id:
            step = self.in_flight.pop()
            for number, old, new, is_after in reversed(step.forks):
                if is_after:
                    self._undo_fork(step, number, old, new)
            for stream in step.named:
                num_undone = sum(count for pending_id, count in stream.pending if pending_id == step.step_id)
                del stream.tokens[len(stream.tokens) - num_undone :]
                stream.pending = [entry for entry in stream.pending if entry[0] != step.step_id]
            for stream, shared, own, place in reversed(step.copied_pages):
                if place < len(stream.pages) and stream.pages[place] == own:
                    stream.pages[place] = shared
                    self._free_pages([own])
                else:
                    self._give_up([shared], 0, self._last_in_flight())
            for number, old, new, is_after in reversed(step.forks):
                if not is_after:
                    self._undo_fork(step, number, old, new)
        self._free_given_up()

    def _last_in_flight(self) -> int:
        return self.in_flight[-1].step_id if self.in_flight else 0

    def _undo_fork(self, step: _Step, number: int, old: NaiveStream | None, new: NaiveStream) -> None:
        is_current = self.streams.get(number) is new and new.forked_by == step.step_id
        if is_current:
            self._free_pages(new.pages)
            new.pages = []
            del self.streams[number]
            self.last_named[number] = step.last_named[new.identity]
            if old is not None:
                self.streams[number] = old
        elif old is not None:
            self._give_up(old.pages, old.made_by, self._last_in_flight())
            old.pages = []

    # ---- streams

    def truncate(self, number: int, length: int) -> None:
        """Cuts a stream back to its first `length` tokens; steps in flight no longer move its length."""
        stream = self.streams.get(number)
        if stream is None:
            assert length == 0
            return
        assert 0 <= length <= stream.committed_length
        num_kept = -(-length // self.page_size)
        pages, stream.pages = stream.pages[num_kept:], stream.pages[:num_kept]
        stream.tokens = stream.tokens[:length]
        stream.pending = []
        stream.forked_by = 0
        self._give_up(pages, stream.made_by, self.last_named.get(number, 0))

    def drop(self, number: int) -> None:
        """Ends a stream; its number may be used again."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            pages, stream.pages = stream.pages, []
            stream.pending = []
            self._give_up(pages, stream.made_by, self.last_named.get(number, 0))


# ---- arrays, one row at a time


def empty_arrays() -> Arrays:
    """Returns the arrays of a plan label without rows."""
    return {
        "qo_indptr": [0],
        "paged_kv_indptr": [0],
        "paged_kv_indices": [],
        "paged_kv_last_page_len": [],
        "kv_lens": [],
        "slot_mapping": [],
        "positions": [],
    }


def append_row(arrays: Arrays, page_size: int, pages: Sequence[int], length: int, span: int) -> None:
    """Adds the row of a stream that holds `length` tokens in `pages` and gets `span` more."""
    kv_len = length + span
    num_pages = -(-kv_len // page_size)
    arrays["qo_indptr"].append(arrays["qo_indptr"][-1] + span)
    arrays["paged_kv_indptr"].append(arrays["paged_kv_indptr"][-1] + num_pages)
    arrays["paged_kv_indices"] += pages[:num_pages]
    arrays["paged_kv_last_page_len"].append((kv_len - 1) % page_size + 1 if kv_len else 0)
    arrays["kv_lens"].append(kv_len)
    for position in range(length, kv_len):
        arrays["slot_mapping"].append(pages[position // page_size] * page_size + position % page_size)
        arrays["positions"].append(position)


def append_padding_row(arrays: Arrays, page_size: int, span: int) -> None:
    """Adds a padding row of `span` tokens: the sink page, over and over."""
    append_row(arrays, page_size, [SINK_PAGE] * -(-span // page_size), 0, span)


def build_arrays(page_size: int, rows: Iterable[tuple[Sequence[int], int, int] | None]) -> Arrays:
    """Builds one plan label's arrays by hand.

    Args:
        page_size: tokens a page holds.
        rows: (pages, tokens held before the step, span) a row; None is a padding row of span 1.
    """
    arrays = empty_arrays()
    for row in rows:
        if row is None:
            append_padding_row(arrays, page_size, 1)
        else:
            append_row(arrays, page_size, *row)
    return arrays


def build_decode_plan(page_size: int, tables: Iterable[tuple[Sequence[int], int]], num_padding: int = 0) -> Arrays:
    """Builds the arrays of a decode step by hand: span 1 for each (pages, tokens held), then padding rows."""
    return build_arrays(page_size, [*((pages, length, 1) for pages, length in tables), *[None] * num_padding])


# ---- layouts


def pack_int32(values: Iterable[int]) -> bytes:
    """Packs numbers as little-endian int32."""
    values = list(values)
    return struct.pack(f"<{len(values)}i", *values)


def unpack_int32(packed: bytes) -> list[int]:
    """Unpacks little-endian int32."""
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def pack_rows(name: str, rows: Iterable[tuple[int, int]]) -> PlanLabelRows:
    """Packs (stream, span) rows; spans that are all 1 are left out, as the wire allows."""
    rows = list(rows)
    spans = [span for _, span in rows]
    return PlanLabelRows(
        name, pack_int32(stream for stream, _ in rows), b"" if all(span == 1 for span in spans) else pack_int32(spans)
    )


def unpack_rows(rows: PlanLabelRows) -> list[tuple[int, int]]:
    """Returns the (stream, span) rows of a plan label."""
    streams = unpack_int32(rows.streams)
    return list(zip(streams, unpack_int32(rows.spans) if rows.spans else [1] * len(streams), strict=True))

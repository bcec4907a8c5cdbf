"""What a step consists of: the rows of its plan labels, padding rows included, as the planner is to see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine_service.labels import COMBINED_LABEL, GUIDANCE_LABELS, MAIN_LABEL
from engine_service.scheduler import ScheduledRow
from planner_service.client import CombinedLabel, ForkRequest, Segment

__all__ = [
    "MAIN_LABEL",
    "LayoutOptions",
    "StepSpec",
    "build_step_spec",
    "count_padding_rows",
    "count_steady_steps",
]

_COMBINED = CombinedLabel(COMBINED_LABEL, (MAIN_LABEL, *GUIDANCE_LABELS))


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """How steps are laid out.

    Args:
        pads_decode_batches: whether decode batches get padding rows, so that their sizes are 1, 2, 4, 8, 16, ...: the
            few shapes that CUDA graphs are captured for.
        combines_guidance: whether the prompts and contexts of a step are planned together, under one plan label, where
            there are contexts; else each label is planned by itself.
    """

    pads_decode_batches: bool = True
    combines_guidance: bool = False


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step. Two equal ones are planned by the same layout.

    Args:
        segments: its rows in batch order, requests named by their `arrival`; padding rows of all labels come last.
        combined_labels: labels that are planned together.
        forks_before: forks that its rows see.
        forks_after: forks that later steps see.
        commit: whether its tokens are kept.
    """

    segments: tuple[Segment, ...]
    combined_labels: tuple[CombinedLabel, ...] = ()
    forks_before: tuple[ForkRequest, ...] = ()
    forks_after: tuple[ForkRequest, ...] = ()
    commit: bool = True

    @property
    def is_repeatable(self) -> bool:
        """Whether the planner can plan it for several steps at once."""
        return self.commit and not self.forks_before and not self.forks_after

    @property
    def num_padding_rows(self) -> int:
        """Padding rows over all labels."""
        return sum(1 for _ in takewhile(lambda segment: segment.request is None, reversed(self.segments)))


def build_step_spec(rows: Sequence[ScheduledRow], options: LayoutOptions) -> StepSpec:
    """Returns the step that computes these rows.

    Args:
        rows: the rows, at least one.
        options: how steps are laid out.
    """
    segments = [Segment(row.request.arrival, label, num_tokens) for row in rows for label, num_tokens in row.parts]
    forks = [
        ForkRequest(fork.source, fork.source_label, fork.target_label, row.request.arrival)
        for row in rows
        for fork in row.forks
    ]
    labels = dict.fromkeys([segment.label for segment in segments])
    combined = (_COMBINED,) if options.combines_guidance and labels.keys() != {MAIN_LABEL} else ()
    if options.pads_decode_batches and all(segment.span == 1 for segment in segments):
        segments += _build_padding(segments, is_combined=bool(combined))
    return StepSpec(tuple(segments), combined, tuple(forks))


def _build_padding(segments: Sequence[Segment], *, is_combined: bool) -> list[Segment]:
    """Returns the padding rows that bring each plan label to its bucket size; they come last in it."""
    num_rows = dict.fromkeys((MAIN_LABEL, *GUIDANCE_LABELS), 0)
    for segment in segments:
        num_rows[segment.label] += 1
    if is_combined:
        last = max((label for label in num_rows if num_rows[label]), key=list(num_rows).index)
        num_rows = {last: len(segments)}
    return [
        Segment(None, label) for label, count in num_rows.items() if count for _ in range(count_padding_rows(count))
    ]


def count_padding_rows(num_rows: int) -> int:
    """Returns how many padding rows bring a batch to its bucket size, the next power of two."""
    return (1 << (num_rows - 1).bit_length()) - num_rows


def count_steady_steps(rows: Sequence[ScheduledRow]) -> int:
    """Returns for how many steps, these rows' own included, the batch stays as it is unless something happens.

    Args:
        rows: the rows of a step, at least one. A batch that decodes stays until its first row has all its tokens; a
            step with a part of a prompt is followed by another one.
    """
    if not all(row.is_decode and row.is_sampled for row in rows):
        return 1
    return min(row.request.max_tokens - row.request.num_generated_tokens for row in rows)

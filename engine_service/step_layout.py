"""What a step consists of: the rows of its plan labels, padding rows included, as the planner is to see them."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.scheduler import ScheduledRow
from planner_service.client import CombinedLabel, ForkRequest, Segment

MAIN_LABEL = "main"


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """How steps are laid out.

    Args:
        pads_decode_batches: whether decode batches get padding rows, so that their sizes are 1, 2, 4, 8, 16, ...: the
            few shapes that CUDA graphs are captured for.
    """

    pads_decode_batches: bool = True


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step. Two equal ones are planned by the same layout.

    Args:
        segments: its rows in batch order, requests named by their `arrival`; padding rows come last under their label.
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


def build_step_spec(rows: Sequence[ScheduledRow], options: LayoutOptions) -> StepSpec:
    """Returns the step that computes these rows.

    Args:
        rows: the rows, at least one.
        options: how steps are laid out.
    """
    segments = [Segment(row.request.arrival, MAIN_LABEL, row.num_tokens) for row in rows]
    if options.pads_decode_batches and all(row.num_tokens == 1 for row in rows):
        segments += [Segment(None, MAIN_LABEL)] * count_padding_rows(len(segments))
    return StepSpec(tuple(segments))


def count_padding_rows(num_rows: int) -> int:
    """Returns how many padding rows bring a batch to its bucket size, the next power of two."""
    return (1 << (num_rows - 1).bit_length()) - num_rows


def count_steady_steps(rows: Sequence[ScheduledRow]) -> int:
    """Returns for how many steps, these rows' own included, the batch stays as it is unless something happens.

    Args:
        rows: the rows of a step, at least one. A batch that decodes stays until its first row has all its tokens; a
            step with a part of a prompt is followed by another one.
    """
    if any(row.num_tokens != 1 or not row.is_sampled for row in rows):
        return 1
    return min(row.request.max_tokens - row.request.num_generated_tokens for row in rows)

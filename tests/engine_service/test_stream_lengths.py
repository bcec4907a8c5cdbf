"""Rules of following the streams' committed lengths."""

from engine_service.step_layout import StepSpec
from engine_service.stream_lengths import StreamLengths
from planner_service.client import ForkRequest, Segment


def test_lengths_rise_by_the_spans_of_each_step() -> None:
    """Equal steps count as often as they have run; padding rows are nobody's."""
    lengths = StreamLengths()
    lengths.add(StepSpec((Segment(1, "main", 5), Segment(2, "main", 2), Segment(None, "main", 3))), 1)
    lengths.add(StepSpec((Segment(1, "main"), Segment(2, "other"))), 4)
    assert dict(lengths.items()) == {(1, "main"): 9, (2, "main"): 2, (2, "other"): 4}


def test_step_that_keeps_nothing_leaves_lengths_as_they_were() -> None:
    """Its streams are known, since they may hold pages that were reserved for it."""
    lengths = StreamLengths()
    lengths.add(StepSpec((Segment(1, "main", 5),)), 1)
    lengths.add(StepSpec((Segment(1, "main", 7), Segment(2, "main", 7)), commit=False), 1)
    assert dict(lengths.items()) == {(1, "main"): 5, (2, "main"): 0}


def test_fork_takes_the_length_of_its_source_at_its_time() -> None:
    """A fork before the step does not have the step's tokens, one after it has."""
    lengths = StreamLengths()
    lengths.add(StepSpec((Segment(1, "main", 5),)), 1)
    spec = StepSpec(
        (Segment(1, "main", 2),),
        forks_before=(ForkRequest(1, "main", "before"),),
        forks_after=(ForkRequest(1, "main", "main", 2),),
    )
    lengths.add(spec, 1)
    assert dict(lengths.items()) == {(1, "main"): 7, (1, "before"): 5, (2, "main"): 7}


def test_dropped_request_is_forgotten() -> None:
    """All its streams are, and no other's."""
    lengths = StreamLengths()
    lengths.add(StepSpec((Segment(1, "main"), Segment(1, "other"), Segment(2, "main"))), 1)
    lengths.drop(1)
    assert dict(lengths.items()) == {(2, "main"): 1}

"""How many tokens of each stream are kept, so that pages reserved beyond them can be given up."""

from collections.abc import Hashable, ItemsView

from engine_service.step_layout import StepSpec

StreamKey = tuple[Hashable, str]  # (request, label)


class StreamLengths:
    """Follows the committed lengths of a session's streams by the steps that have run."""

    def __init__(self) -> None:
        self._lengths: dict[StreamKey, int] = {}

    def add(self, spec: StepSpec, num_steps: int) -> None:
        """Counts a step that has run, or several equal ones.

        Args:
            spec: the step.
            num_steps: how often it has run.
        """
        lengths = self._lengths
        for fork in spec.forks_before:
            lengths[fork.target_key()] = lengths.get((fork.request, fork.source), 0)
        for request, label, span in spec.segments:
            if request is not None:
                num_tokens = span * num_steps if spec.commit else 0
                lengths[request, label] = lengths.get((request, label), 0) + num_tokens
        for fork in spec.forks_after:
            lengths[fork.target_key()] = lengths.get((fork.request, fork.source), 0)

    def drop(self, request: Hashable) -> None:
        """Forgets a request's streams."""
        for key in [key for key in self._lengths if key[0] == request]:
            del self._lengths[key]

    def items(self) -> ItemsView[StreamKey, int]:
        """Returns every stream with its length in tokens."""
        return self._lengths.items()

"""Steps that are not kept: spans of many tokens run against a request's contexts, as often as one likes.

Models that draft or denoise a whole span read their contexts again and again, each time with another guess at the span,
and keep the last guess at most.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch

from engine_service.planner_link import StepPlanner
from engine_service.step_layout import StepSpec
from planner_service.client import CombinedLabel, ForkRequest, Plan, Segment


class SpanForward(Protocol):
    """A model over a paged KV cache that tells the logits of any token."""

    def forward_with_places(
        self, token_ids: Mapping[str, torch.Tensor], plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Runs a step; see `ModelRunner`."""


class TrialContexts:
    """The KV sequences of one request outside the scheduler: they are extended, forked, and tried spans on.

    Used by the thread that uses the planner. A step that fails changes nothing.

    Args:
        planner: plans the steps; it has a session.
        runner: the model.
        request: names the request; no other request of the session has this name.
        combined_label: plans all labels together under this name; None plans each by itself.
    """

    def __init__(
        self, planner: StepPlanner, runner: SpanForward, request: Hashable, *, combined_label: str | None = None
    ) -> None:
        self._planner = planner
        self._runner = runner
        self._request = request
        self._combined_label = combined_label
        self._labels: dict[str, None] = {}

    def extend(
        self, token_ids: Mapping[str, Sequence[int]], *, forks: Sequence[tuple[str, str]] = ()
    ) -> dict[str, torch.Tensor]:
        """Adds tokens to labels, and keeps them.

        Args:
            token_ids: for each label its tokens, at least one each; labels that are not named stay as they are.
            forks: (source, target) labels; each target becomes equal to its source before the tokens are added.

        Returns:
            For each label the logits that follow each of its tokens, float32 [num_tokens, vocab_size].

        Raises:
            LayoutError: there is no plan; `OutOfPagesError` where pages were short.
            SessionLostError: the session has ended, and with it every label.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        return self._run(token_ids, forks=forks, commit=True)

    def try_spans(self, token_ids: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Runs tokens after what labels hold, and keeps none of them.

        Args:
            token_ids: for each label its tokens, at least one each.

        Returns:
            For each label the logits that follow each of its tokens, float32 [num_tokens, vocab_size].

        Raises:
            LayoutError: as `extend` does.
            SessionLostError: as `extend` does.
            ProtocolError: as `extend` does.
        """
        return self._run(token_ids, forks=(), commit=False)

    def close(self) -> None:
        """Gives up every page. May be called again.

        Raises:
            SessionLostError: the session has ended, and with it every label.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        self._planner.drop(self._request)
        self._planner.flush()

    def _run(
        self, token_ids: Mapping[str, Sequence[int]], *, forks: Sequence[tuple[str, str]], commit: bool
    ) -> dict[str, torch.Tensor]:
        plan = self._planner.plan_step(self._build_spec(token_ids, forks, commit=commit))
        is_kept = False
        try:
            logits = self._forward(token_ids, plan)
            is_kept = True
        finally:
            self._planner.end_step(plan, is_kept=is_kept)
        return logits

    def _build_spec(
        self, token_ids: Mapping[str, Sequence[int]], forks: Sequence[tuple[str, str]], *, commit: bool
    ) -> StepSpec:
        self._labels.update(dict.fromkeys(token_ids))
        name = self._combined_label
        return StepSpec(
            tuple(Segment(self._request, label, len(tokens)) for label, tokens in token_ids.items()),
            () if name is None else (CombinedLabel(name, tuple(self._labels)),),
            tuple(ForkRequest(self._request, source, target) for source, target in forks),
            commit=commit,
        )

    def _forward(self, token_ids: Mapping[str, Sequence[int]], plan: Plan) -> dict[str, torch.Tensor]:
        by_plan_label: dict[str, torch.Tensor] = {}
        labels: list[str] = []
        for name, arrays in plan.labels.items():
            rows = [label for _, label in filter(None, arrays.rows)]
            labels += rows
            tokens = [token_id for label in rows for token_id in token_ids[label]]
            by_plan_label[name] = torch.tensor(tokens, dtype=torch.int64)
        places = [(name, range(len(tokens))) for name, tokens in by_plan_label.items()]
        logits = self._runner.forward_with_places(by_plan_label, plan, places)[1]
        parts = torch.split(logits, [len(token_ids[label]) for label in labels])
        return dict(zip(labels, parts, strict=True))

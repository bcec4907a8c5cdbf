"""`attention.py`: what transformers calls, and where it goes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine_service.attention import ATTENTION_NAME, attend_paged, register_attention
from engine_service.errors import UnsupportedModelError


class RecordingStep:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...], float, dict[str, Any]]] = []

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """Returns the query."""
        self.calls.append((tuple(query.shape), tuple(key.shape), scale, extras))
        return query


def build_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as a model passes them: [1, heads, tokens, head_dim]."""
    return torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)


def test_tokens_come_first_on_the_way_in_and_out() -> None:
    """The step sees [tokens, heads, head_dim]; the model gets [1, tokens, heads, head_dim] back."""
    step = RecordingStep()
    query, key, value = build_inputs()
    output, weights = attend_paged(nn.Identity(), query, key, value, None, 0.5, ringplan_step=step, sliding_window=None)
    assert weights is None
    assert torch.equal(output, query.transpose(1, 2))
    assert step.calls == [((3, 4, 16), (3, 2, 16), 0.5, {"sliding_window": None})]


def test_without_a_scale_scores_are_scaled_by_the_head() -> None:
    """1 / sqrt(head_dim), as everywhere in transformers."""
    step = RecordingStep()
    attend_paged(nn.Identity(), *build_inputs(), None, ringplan_step=step)
    assert step.calls[0][2] == 0.25


def test_what_it_cannot_honour_is_refused() -> None:
    """A call without the plan, a mask of the model's own, dropout."""
    with pytest.raises(UnsupportedModelError, match="keyword arguments"):
        attend_paged(nn.Identity(), *build_inputs(), None)
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        attend_paged(nn.Identity(), *build_inputs(), torch.zeros(1, 1, 3, 3), ringplan_step=RecordingStep())
    with pytest.raises(UnsupportedModelError, match="dropout"):
        attend_paged(nn.Identity(), *build_inputs(), None, dropout=0.1, ringplan_step=RecordingStep())


def test_transformers_knows_it_and_makes_no_masks_for_it() -> None:
    """An attention without a mask function gets no mask: one would be built for nothing in every step."""
    register_attention()
    assert AttentionInterface()[ATTENTION_NAME] is attend_paged
    assert ATTENTION_NAME not in AttentionMaskInterface()

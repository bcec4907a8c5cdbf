"""Rules of guidance: its formula is that of transformers, and of a reference in numpy."""

import numpy as np
import pytest
import torch
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_outputs import CausalLMOutput

from engine_service.guidance import guide
from tests.reference.dense_guidance import guide_dense

LOGITS = [4 * torch.randn(3, 17, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def _column(*scales: float) -> torch.Tensor:
    return torch.tensor(scales).unsqueeze(1)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 7.0])
def test_one_context_is_what_transformers_makes_of_it(scale: float) -> None:
    """The logits processor of `generate(guidance_scale=...)` gives the same scores."""

    class Context:
        def __call__(self, *_given: object, **_named: object) -> CausalLMOutput:
            return CausalLMOutput(logits=LOGITS[1].unsqueeze(1))

    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(
        scale,
        Context(),
        unconditional_ids=torch.zeros(3, 1, dtype=torch.int64),
        unconditional_attention_mask=torch.ones(3, 1, dtype=torch.int64),
        use_cache=False,
    )
    expected = processor(torch.zeros(3, 1, dtype=torch.int64), LOGITS[0])
    torch.testing.assert_close(guide(LOGITS[0], [LOGITS[1]], [_column(scale, scale, scale)]), expected)


def test_scales_are_the_rows_own() -> None:
    """Each row goes as far from its contexts as its request says."""
    scales = [(1.5, 2.0), (3.0, 0.0), (1.0, 1.0)]
    guided = guide(LOGITS[0], LOGITS[1:], [_column(*column) for column in zip(*scales, strict=True)])
    for row, pair in enumerate(scales):
        main, *others = (logits[row].double().numpy() for logits in LOGITS)
        np.testing.assert_allclose(guided[row].numpy(), guide_dense(main, others, pair), rtol=1e-5, atol=1e-5)


def test_scale_of_one_leaves_a_context_out_of_account() -> None:
    """What comes out are the prompt's own log-probabilities."""
    guided = guide(LOGITS[0], [LOGITS[1]], [_column(1, 1, 1)])
    torch.testing.assert_close(guided, torch.log_softmax(LOGITS[0], dim=-1))

"""Classifier-free guidance: what tokens of a guided request are chosen from."""

from collections.abc import Sequence

import torch


def guide(logits: torch.Tensor, contexts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Moves log-probabilities away from those that follow further contexts.

    Args:
        logits: float32 [num_rows, vocab_size], those that follow the prompt.
        contexts: the same for each further context.
        scales: for each context float32 [num_rows, 1], how far to go from it: 1 leaves it out of account.

    Returns:
        float32 [num_rows, vocab_size]. With L the log-softmax of the logits and C_k those of the contexts,
        `scale_1 * (L - C_1) + C_1`; with two contexts, that result in the place of L in `scale_2 * (L - C_2) + C_2`.

    Source:
        Sanchez et al., "Stay on topic with Classifier-Free Guidance", equation 7, as transformers'
        UnbatchedClassifierFreeGuidanceLogitsProcessor has it; nested for two contexts as BAGEL nests text and image.
    """
    guided = torch.log_softmax(logits, dim=-1)
    for context, scale in zip(contexts, scales, strict=True):
        away_from = torch.log_softmax(context, dim=-1)
        guided = scale * (guided - away_from) + away_from
    return guided

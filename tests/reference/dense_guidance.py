"""Guided generation without cache, pages, plans or batches: the whole of every sequence goes in for every token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

Logits = npt.NDArray[np.float64]


def take_log_softmax(logits: Logits) -> Logits:
    """Returns the log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def run_dense(model: PreTrainedModel, tokens: Sequence[int]) -> Logits:
    """Returns the logits that follow each token, [num_tokens, vocab_size]."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.double().numpy()


def guide_dense(main: Logits, contexts: Sequence[Logits], scales: Sequence[float]) -> Logits:
    """Returns what guidance makes of logits: away from each context in turn, in units of log-probabilities."""
    result = take_log_softmax(main)
    for logits, scale in zip(contexts, scales, strict=True):
        context = take_log_softmax(logits)
        result = context + scale * (result - context)
    return result


def generate_guided(
    model: PreTrainedModel,
    prompt: Sequence[int],
    contexts: Sequence[Sequence[int]],
    scales: Sequence[float],
    num_tokens: int,
    eos_token_id: int,
) -> list[int]:
    """Returns the greedy answer of a prompt that is guided away from further contexts."""
    answer: list[int] = []
    while len(answer) < num_tokens and answer[-1:] != [eos_token_id]:
        main, *others = (run_dense(model, [*tokens, *answer])[-1] for tokens in (prompt, *contexts))
        answer.append(int(guide_dense(main, others, scales).argmax()))
    return answer

"""Log-probabilities of tokens that stand somewhere, and of the likeliest in their place."""

from collections.abc import Sequence

import torch

from engine_service.sampling_params import SampledToken, TokenLogprob

# Rows at a time: the logits of a long prompt are large, and a copy of all of them would double that.
_MAX_ROWS = 64


def build_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[SampledToken]:
    """Returns how likely tokens are.

    Args:
        logits: float [num_rows, vocab_size].
        token_ids: the token of each row.
        num_top: how many of the likeliest tokens to name, for each row.

    Returns:
        For each row its token, with the log-probability under the softmax of its logits.
    """
    results: list[SampledToken] = []
    for start in range(0, len(token_ids), _MAX_ROWS):
        stop = start + _MAX_ROWS
        results += _build_some(logits[start:stop], token_ids[start:stop], num_top[start:stop])
    return results


def _build_some(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[SampledToken]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    top_values, top_ids = (part.tolist() for part in logprobs.topk(min(max(num_top), logprobs.shape[-1]), dim=-1))
    results = []
    for row, (token_id, logprob, count) in enumerate(zip(token_ids, own, num_top, strict=True)):
        pairs = zip(top_ids[row][:count], top_values[row][:count], strict=True)
        results.append(SampledToken(token_id, logprob, tuple([TokenLogprob(*pair) for pair in pairs])))
    return results

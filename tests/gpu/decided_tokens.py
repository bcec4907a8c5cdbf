"""What transformers answers in half precision, without what rounding alone could change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class DecidedAnswer:
    """Tokens that every implementation must choose one after the other, since rounding alone cannot change them.

    Args:
        prompt: what they follow.
        token_ids: the tokens.
    """

    prompt: tuple[int, ...]
    token_ids: list[int]


@torch.no_grad()
def generate_decided(
    folder: Path, dtype: torch.dtype, device: torch.device, prompts: Sequence[tuple[int, ...]], num_tokens: int
) -> list[DecidedAnswer]:
    """Returns the parts of transformers' greedy answers that are decided.

    What rounding costs is measured on transformers itself: how far the chosen token's lead over any other is from what
    it is in float32 with the same weights, at most, over everything said here. Another implementation that rounds as
    much may be as far from that, to the other side; so a lead of more than twice as much is the same token's in both.
    A choice with a smaller one ends a part, and the next part follows it.

    Args:
        folder: the model.
        dtype: the type.
        device: where to compute.
        prompts: the prompts.
        num_tokens: tokens of each answer.
    """
    model, exact = _load(folder, dtype, device), _load(folder, dtype, device).float()
    answers, leads, largest = [], [], 0.0
    for prompt in prompts:
        input_ids = torch.tensor([prompt], device=device)
        tokens = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answer = tokens[0, len(prompt) :]
        # By how much the chosen token leads over each other one, in the type and in float32.
        lead, exact_lead = (_find_leads(one, tokens, answer) for one in (model, exact))
        largest = max(largest, float((lead - exact_lead).abs().max()))
        answers.append(answer.tolist())
        # The smallest but the chosen token's own, which is 0.
        leads.append(lead.kthvalue(2, dim=-1).values.tolist())
    parts = []
    for prompt, answer, some in zip(prompts, answers, leads, strict=True):
        starts = [0, *(number + 1 for number, lead in enumerate(some) if lead <= 2 * largest)]
        ends = [*(start - 1 for start in starts[1:]), len(answer)]
        parts += [
            DecidedAnswer((*prompt, *answer[:start]), answer[start:end])
            for start, end in zip(starts, ends, strict=True)
            if start < end
        ]
    return parts


def _find_leads(model: PreTrainedModel, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits[0, -len(answer) - 1 : -1].float()
    return logits.gather(1, answer.unsqueeze(1)) - logits


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    moved: PreTrainedModel = model.to(device).eval()
    return moved

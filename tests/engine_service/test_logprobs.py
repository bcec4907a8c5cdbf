"""`logprobs.py`: the log-softmax of each row, for its token and the likeliest."""

import pytest
import torch

from engine_service.logprobs import build_logprobs


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 200])
def test_each_row_has_its_own_token_and_number(num_rows: int) -> None:
    """However many rows there are; a number beyond the vocabulary brings all of it."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn((num_rows, 9), generator=generator) * 3
    token_ids = torch.randint(0, 9, (num_rows,), generator=generator).tolist()
    num_top = [row % 12 for row in range(num_rows)]
    found = build_logprobs(logits, token_ids, num_top)
    expected = torch.log_softmax(logits, dim=-1)
    assert [token.token_id for token in found] == token_ids
    for row, token in enumerate(found):
        assert token.logprob == pytest.approx(expected[row, token.token_id].item(), abs=1e-6)
        values, ids = expected[row].topk(min(num_top[row], 9))
        assert [top.token_id for top in token.top_logprobs] == ids.tolist()
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-6)


def test_half_precision_is_widened_first() -> None:
    """The sum over a vocabulary of 16-bit numbers would be rough."""
    logits = torch.linspace(-4, 4, 500).to(torch.bfloat16).unsqueeze(0)
    (found,) = build_logprobs(logits, [499], [0])
    assert found.logprob == pytest.approx(torch.log_softmax(logits.double(), dim=-1)[0, 499].item(), abs=1e-5)

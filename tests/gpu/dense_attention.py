"""Attention in float64 over the slots that a plan's arrays name, and how far a kernel may be from it."""

from dataclasses import dataclass

import torch

from tests.reference.naive_planner import Arrays


@dataclass(frozen=True)
class DenseAttention:
    """What attention of a row's query tokens is, [span, num_heads, head_dim] each.

    Args:
        output: in float64.
        bound: how far a kernel that adds up in float32 may be from it.
    """

    output: torch.Tensor
    bound: torch.Tensor


def attend_row(
    arrays: Arrays, row: int, pages: torch.Tensor, query: torch.Tensor, scale: float, page_size: int
) -> DenseAttention:
    """Computes one row.

    The bound, for values of type T with rounding unit u and float32 with unit f = 2^-24, a head of d elements, a row of
    L keys with weights p and values v:

    - a score is a float32 sum of d products, scaled: it is off by at most e = scale * sum |q k| * (d + 3) f, and its
      weight by a factor of at most exp(2 e), numerator and denominator together;
    - a weight is an exponential to two units of float32, and is rounded to T before it is multiplied: u, and half of
      the smallest number of T where T has no smaller ones;
    - what the weights are divided by may be the sum of the rounded ones: u times the result;
    - the sum over the row adds L f; the result is rounded to T: u times itself.

    Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3, for sums of products.

    Args:
        arrays: the plan label's.
        row: which row.
        pages: one layer of the cache.
        query: [num_tokens, num_heads, head_dim], the label's.
        scale: what scores are multiplied by.
        page_size: tokens a page holds.
    """
    start, end = arrays["qo_indptr"][row : row + 2]
    kv_len, first = arrays["kv_lens"][row], arrays["paged_kv_indptr"][row]
    token = torch.arange(kv_len, device=pages.device)
    page = torch.tensor(arrays["paged_kv_indices"], device=pages.device)[first + token // page_size]
    keys, values = (pages[page, kind, token % page_size].double() for kind in (0, 1))  # [L, num_kv_heads, d]
    num_groups = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(num_groups, dim=1) for part in (keys, values))
    rows = query[start:end].double()
    scores = torch.einsum("qhd,lhd->qhl", rows, keys) * scale
    sizes = torch.einsum("qhd,lhd->qhl", rows.abs(), keys.abs()) * scale
    last_read = torch.arange(kv_len - (end - start), kv_len, device=pages.device)
    is_masked = (token[None] > last_read[:, None])[:, None]
    weights = torch.softmax(scores.masked_fill(is_masked, -torch.inf), dim=-1)
    output = torch.einsum("qhl,lhd->qhd", weights, values)

    info, f = torch.finfo(query.dtype), 2.0**-24
    u, head_dim = info.eps / 2, query.shape[-1]
    score_error = sizes.masked_fill(is_masked, 0.0).amax(dim=-1, keepdim=True) * (head_dim + 3) * f
    weight_error = torch.expm1(2 * score_error) + u + 4 * f + kv_len * f
    spread = torch.einsum("qhl,lhd->qhd", weights, values.abs())
    is_read = (~is_masked).expand(-1, query.shape[1], -1).double()
    tiny = info.smallest_normal * info.eps / 2 * torch.einsum("qhl,lhd->qhd", is_read, values.abs())
    return DenseAttention(output, weight_error * spread + tiny + 2 * u * output.abs() + info.smallest_normal)

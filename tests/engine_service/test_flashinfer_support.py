"""`flashinfer_support.py`: what FlashInfer has no kernels for is found, and called by its name."""

import pytest
import torch

from engine_service.attention_backends.flashinfer_support import Capability, find_unsupported, wants_tensor_cores
from engine_service.kv_cache import KvShape

H100: Capability = (9, 0)


def build_shape(head_dim: int = 128, num_kv_heads: int = 8, dtype: torch.dtype = torch.bfloat16) -> KvShape:
    """Builds what a model's attention keeps of a token."""
    return KvShape(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [8, 16, 40, 56])
def test_usual_models_are_served(head_dim: int, dtype: torch.dtype, num_heads: int) -> None:
    """Any number of query heads a key head, five and seven too: tensor cores take those."""
    assert find_unsupported(build_shape(head_dim, dtype=dtype), num_heads, H100) == []


@pytest.mark.parametrize(
    ("shape", "num_heads", "capability", "expected"),
    [
        (build_shape(80), 8, H100, "heads of dimension 80 (it has 64, 128, 256)"),
        (build_shape(32), 8, H100, "heads of dimension 32 (it has 64, 128, 256)"),
        (build_shape(dtype=torch.float32), 8, H100, "float32 (it has float16, bfloat16)"),
        (build_shape(), 12, H100, "12 query heads over 8 key heads (the one must divide the other)"),
        (build_shape(), None, H100, "a configuration without a number of query heads for all layers"),
        (build_shape(), 8, None, "a model that does not run on a CUDA device"),
        (build_shape(), 8, (7, 0), "a GPU of compute capability 7.0 (it needs 7.5)"),
        (build_shape(), 8, (7, 5), "bfloat16 on a GPU of compute capability 7.5 (float16 works)"),
    ],
)
def test_what_is_not_served_is_named(
    shape: KvShape, num_heads: int | None, capability: Capability | None, expected: str
) -> None:
    """With what there is instead."""
    assert find_unsupported(shape, num_heads, capability) == [expected]


def test_everything_that_is_in_the_way_is_named_at_once() -> None:
    """One start shows all of it."""
    assert len(find_unsupported(build_shape(80, dtype=torch.float32), 12, None)) == 4


@pytest.mark.parametrize(
    ("num_heads", "expected"), [(8, False), (16, False), (24, False), (32, True), (40, True), (56, True), (64, True)]
)
def test_tensor_cores_decode_where_they_are_faster(num_heads: int, expected: bool) -> None:
    """From four query heads a key head on; for five and seven there is no other kernel."""
    assert wants_tensor_cores(num_heads, 8) is expected

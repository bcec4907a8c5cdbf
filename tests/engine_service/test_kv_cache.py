"""`kv_cache.py`: keys and values land in their slots, and pages are copied in order."""

import numpy as np
import pytest
import torch

from engine_service.kv_cache import KvCache, KvShape

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def build_cache(page_size: int = 4, num_pages: int = 6) -> KvCache:
    """A cache of zeros."""
    cache = KvCache(SHAPE, num_pages=num_pages, page_size=page_size, device=torch.device("cpu"))
    cache.pages.zero_()
    return cache


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_each_token_stands_in_the_slot_of_its_mapping(page_size: int) -> None:
    """Keys first, values second, of the one layer that is written."""
    cache = build_cache(page_size)
    slots = np.array([2 * page_size, 5, 1], dtype=np.int32)
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    cache.write(1, key, value, cache.build_write_rows(slots))
    expected = torch.zeros_like(cache.pages)
    for token, slot in enumerate(slots.tolist()):
        expected[1, slot // page_size, 0, slot % page_size] = key[token]
        expected[1, slot // page_size, 1, slot % page_size] = value[token]
    assert torch.equal(cache.pages, expected)
    assert torch.equal(cache.layer(1), expected[1])


def test_keys_of_another_memory_order_are_written_the_same() -> None:
    """A model hands over transposed views."""
    cache, other = build_cache(), build_cache()
    key, value = torch.randn(2, 3, 4).transpose(0, 1), torch.randn(2, 3, 4).transpose(0, 1)
    rows = cache.build_write_rows(np.array([4, 9, 23], dtype=np.int32))
    cache.write(0, key, value, rows)
    other.write(0, key.contiguous(), value.contiguous(), rows)
    assert torch.equal(cache.pages, other.pages)


@pytest.mark.parametrize(
    "copies", [[(1, 2)], [(1, 2), (3, 4)], [(1, 2), (2, 3), (3, 5)], [(1, 4), (2, 4)], [(1, 2), (3, 1)]]
)
def test_pages_are_copied_one_after_the_other(copies: list[tuple[int, int]]) -> None:
    """A copy may read what an earlier one wrote; all layers are copied."""
    cache = build_cache()
    cache.pages.copy_(torch.randn(cache.pages.shape))
    expected = cache.pages.clone()
    for source, target in copies:
        expected[:, target] = expected[:, source]
    cache.copy_pages(np.array(copies, dtype=np.int32))
    assert torch.equal(cache.pages, expected)


def test_no_copies_change_nothing() -> None:
    """The usual case."""
    cache = build_cache()
    cache.copy_pages(np.zeros((0, 2), dtype=np.int32))
    assert not cache.pages.any()


def test_the_bytes_of_a_page_are_those_of_the_tensor() -> None:
    """In all layers, keys and values."""
    cache = build_cache(page_size=5, num_pages=7)
    assert SHAPE.bytes_per_page(5) * 7 == cache.pages.numel() * cache.pages.element_size()
    half = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16)
    assert half.bytes_per_page(5) * 2 == SHAPE.bytes_per_page(5)

"""`warm_up.py`: a model has run before it serves, and nothing of that is left where a request could read it."""

from pathlib import Path

import pytest
import torch

from engine_service.kv_cache import KvCache
from engine_service.model_loading import load_model
from engine_service.model_runner import ModelRunner
from engine_service.warm_up import build_padding_plan, warm_up
from tests.engine_service.hand_plans import PAD, HandPlanner
from tests.engine_service.tiny_models import save_tiny_checkpoint

ARRAYS = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "kv_lens",
    "slot_mapping",
    "positions",
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_plan_is_that_of_padding_rows(page_size: int) -> None:
    """Array for array what the naive planner of the tests makes of them."""
    spans = (64, 1, 7)
    expected = HandPlanner(page_size=page_size, num_pages=2).plan({"main": [(PAD, span) for span in spans]})
    found = build_padding_plan(spans, page_size).labels["main"]
    for name in ARRAYS:
        array = getattr(found, name)
        assert array.tolist() == getattr(expected.labels["main"], name).tolist(), name
        assert array.dtype == "int32"


@pytest.mark.parametrize("max_step_tokens", [1, 512])
def test_only_the_sink_page_is_written(tmp_path: Path, max_step_tokens: int) -> None:
    """Every other page is as it was, and the sink page is not."""
    runner = ModelRunner(load_model(save_tiny_checkpoint("llama", tmp_path)), num_pages=6, page_size=4)
    cache: KvCache = runner.cache
    cache.pages.fill_(7.0)
    warm_up(runner, max_step_tokens)
    assert bool((cache.pages[:, 1:] == 7.0).all())
    assert not bool((cache.pages[:, 0, :, 0] == 7.0).any())
    assert bool(torch.isfinite(cache.pages).all())

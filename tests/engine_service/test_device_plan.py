"""`device_plan.py`: views of a copied run are the arrays of the plan."""

import numpy as np
import torch

from engine_service.device_plan import build_device_arrays
from planner_service.client import ARRAY_NAMES, ArraysExtent, PlanArrays

COUNTS = {
    "qo_indptr": 4,
    "paged_kv_indptr": 4,
    "paged_kv_indices": 7,
    "paged_kv_last_page_len": 3,
    "kv_lens": 3,
    "slot_mapping": 5,
    "positions": 5,
}


def test_each_array_is_where_its_offset_says() -> None:
    """An array that starts at byte b of the buffer set starts at element b / 4 of the copy, with its own length."""
    staging = torch.arange(1_000, 2_000, dtype=torch.int32)
    offsets = (512, 0, 1_024, 64, 192, 256, 2_048)
    columns = {name: np.zeros(count, dtype=np.int32) for name, count in COUNTS.items()}
    extent = ArraysExtent("cfg_img", 3, 5, 7, offsets)
    arrays = build_device_arrays(staging, PlanArrays(name="cfg_img", rows=(None,) * 3, extent=extent, **columns))
    assert arrays.name == "cfg_img"
    for name, offset in zip(ARRAY_NAMES, offsets, strict=True):
        view: torch.Tensor = getattr(arrays, name)
        first = 1_000 + offset // 4
        assert view.tolist() == list(range(first, first + COUNTS[name])), name
        assert view.data_ptr() == staging.data_ptr() + offset, "a view, not a copy"

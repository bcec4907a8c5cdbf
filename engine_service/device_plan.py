"""A plan's arrays on the device: views of one copy of its whole run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_service.copy_fence import Event
from planner_service.client import ARRAY_NAMES, Plan, PlanArrays

ITEM_BYTES = 4  # every array holds int32


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """The index arrays of one plan label on the device: int32 views of a staging tensor, as `PlanArrays` has them.

    They are complete once the plan's `copied` event is, and stay as they are until the forward that was given them has
    run.

    Args:
        name: the plan label.
        qo_indptr: shape [num_rows + 1].
        paged_kv_indptr: shape [num_rows + 1].
        paged_kv_indices: shape [num_indices].
        paged_kv_last_page_len: shape [num_rows].
        kv_lens: shape [num_rows], in tokens.
        slot_mapping: shape [num_tokens].
        positions: shape [num_tokens].
    """

    name: str
    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    kv_lens: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan and its copy on the device.

    Args:
        plan: the plan, on the host.
        labels: the arrays of each plan label on the device, in the plan's order.
        copied: comes after the copy.
    """

    plan: Plan
    labels: Mapping[str, DeviceArrays]
    copied: Event


def build_device_arrays(staging: torch.Tensor, arrays: PlanArrays) -> DeviceArrays:
    """Returns the views of one plan label.

    Args:
        staging: int32, the copy of the plan's run: what stands at its start stands at the start of the buffer set.
        arrays: the plan label on the host; its `extent` says where its arrays stand.
    """
    starts = [offset // ITEM_BYTES for offset in arrays.extent.offsets]
    views = {
        name: staging[start : start + len(getattr(arrays, name))]
        for name, start in zip(ARRAY_NAMES, starts, strict=True)
    }
    return DeviceArrays(arrays.name, **views)

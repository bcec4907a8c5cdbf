"""Lets FlashInfer compile the kernels that the tests run: all of them at once, or those of `... TYPE KIND`."""

import itertools
import subprocess
import sys
from pathlib import Path

import torch

from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from planner_service.client import ARRAY_NAMES
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays
from tests.gpu.side import Side

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 128, 16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = {"decode": [(20, 1)], "prefill": [(0, 20)]}


def list_kernels() -> list[tuple[str, str]]:
    """Returns the arguments of each run that there is to do."""
    return list(itertools.product(DTYPES, ROWS))


def run_once(side: Side, dtype: str, kind: str) -> torch.Tensor:
    """Computes attention of one row."""
    shape = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=DTYPES[dtype])
    backend = side.build_backend("flashinfer", shape, num_heads=NUM_HEADS, page_size=PAGE_SIZE)
    lists = build_scattered_arrays(ROWS[kind], PAGE_SIZE)
    columns = {name: torch.tensor(lists[name], dtype=torch.int32, device=side.device) for name in ARRAY_NAMES}
    batch = backend.prepare(build_plan_arrays("main", lists), DeviceArrays("main", **columns))
    pages = torch.zeros((4, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), dtype=shape.dtype, device=side.device)
    query = torch.zeros((len(lists["slot_mapping"]), NUM_HEADS, HEAD_DIM), dtype=shape.dtype, device=side.device)
    return backend.attend(pages, query, batch, 1.0)


def compile_all() -> None:
    """Compiles each kind in a process of its own: one after the other, when first used, takes minutes."""
    command = [sys.executable, "-m", "tests.gpu.compile_kernels"]
    root = Path(__file__).resolve().parent.parent.parent
    processes = [subprocess.Popen([*command, *arguments], cwd=root) for arguments in list_kernels()]
    for process in processes:
        # Whatever goes wrong shows in the tests that need the kernels.
        process.wait()


if __name__ == "__main__":
    if sys.argv[1:]:
        run_once(Side(torch.device("cuda")), *sys.argv[1:])
        torch.cuda.synchronize()
    else:
        compile_all()

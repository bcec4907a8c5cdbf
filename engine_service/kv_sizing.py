"""How many pages the KV cache has."""

from pathlib import Path

import torch

from engine_service.errors import NotEnoughMemoryError

# The planner numbers slots, and the tokens of one more step, with 31 bits.
_MAX_SLOTS = (1 << 31) - (1 << 24)

# The sink page and one that holds tokens.
MIN_PAGES = 2


def choose_num_pages(
    bytes_per_page: int,
    *,
    page_size: int,
    available_bytes: int,
    num_pages: int = 0,
    memory_share: float = 0.5,
    max_useful_pages: int | None = None,
) -> int:
    """Returns the number of pages of the KV cache, the sink page included.

    Args:
        bytes_per_page: what a page takes in all layers.
        page_size: tokens a page holds.
        available_bytes: memory that is free once the model is loaded; `find_available_bytes` tells.
        num_pages: so many; 0 chooses by `memory_share`.
        memory_share: the part of the available memory to use, above 0, at most 1.
        max_useful_pages: more than this are of no use to anyone, such as every running request at its full context;
            does not limit `num_pages`.

    Raises:
        NotEnoughMemoryError: they do not fit.
    """
    most = min(_MAX_SLOTS // page_size, available_bytes // bytes_per_page)
    if num_pages:
        if num_pages > most:
            raise NotEnoughMemoryError(num_pages, most, bytes_per_page, "num_pages")
        return num_pages
    fit = min(most, int(available_bytes * memory_share) // bytes_per_page)
    if fit < MIN_PAGES:
        raise NotEnoughMemoryError(MIN_PAGES, fit, bytes_per_page, "memory_share, or give num_pages")
    return fit if max_useful_pages is None else min(fit, max(max_useful_pages, MIN_PAGES))


def find_available_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Returns the memory that a new tensor on `device` could take, in bytes.

    Args:
        device: a CPU or a CUDA device.
        root: where `proc` and `sys` are; for tests.

    Returns:
        On a GPU its free memory. On a CPU what the kernel calls available, or less where the control group leaves less.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _read_mem_available(root / "proc/meminfo")
    left = _read_group_left(root)
    return available if left is None else min(available, left)


def _read_mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no MemAvailable line")


def _read_group_left(root: Path) -> int | None:
    """What the process's own control group leaves, or None where it sets no limit. Version 2, then version 1."""
    lefts = []
    for limit_name, used_name in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            lefts.append(max(int(limit) - int(used), 0))
    return min(lefts, default=None)

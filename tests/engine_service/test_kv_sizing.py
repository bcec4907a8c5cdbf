"""`kv_sizing.py`: as many pages as fit, and clear words when they do not."""

from pathlib import Path

import pytest
import torch

from engine_service.errors import NotEnoughMemoryError
from engine_service.kv_sizing import choose_num_pages, find_available_bytes


def test_pages_fill_the_share_of_memory() -> None:
    """Rounded down."""
    assert choose_num_pages(1000, page_size=16, available_bytes=100_999, memory_share=0.5) == 50


def test_no_more_pages_than_are_of_use() -> None:
    """But a number that is asked for is given."""
    assert choose_num_pages(1000, page_size=16, available_bytes=10**6, max_useful_pages=30) == 30
    assert choose_num_pages(1000, page_size=16, available_bytes=10**6, num_pages=40, max_useful_pages=30) == 40


def test_no_more_pages_than_the_planner_can_number() -> None:
    """Slots, and the tokens of one more step, have 31 bits."""
    assert choose_num_pages(1, page_size=16, available_bytes=2**40, memory_share=1.0) == (2**31 - 2**24) // 16


def test_pages_that_do_not_fit_are_refused_with_the_figures() -> None:
    """How many fit, and which setting changes it."""
    with pytest.raises(NotEnoughMemoryError, match="num_pages") as caught:
        choose_num_pages(1000, page_size=16, available_bytes=9_999, num_pages=10)
    assert (caught.value.num_pages_wanted, caught.value.num_pages_fit, caught.value.bytes_per_page) == (10, 9, 1000)
    with pytest.raises(NotEnoughMemoryError, match="memory_share") as caught:
        choose_num_pages(1000, page_size=16, available_bytes=3_000, memory_share=0.5)
    assert (caught.value.num_pages_wanted, caught.value.num_pages_fit) == (2, 1)


def write(root: Path, name: str, content: str) -> None:
    """Writes a file of a made-up machine."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    """Where no control group sets a limit."""
    write(tmp_path, "proc/meminfo", "MemTotal:  900 kB\nMemAvailable:     700 kB\n")
    assert find_available_bytes(torch.device("cpu"), root=tmp_path) == 700 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "5000\n")
    assert find_available_bytes(torch.device("cpu"), root=tmp_path) == 700 * 1024


@pytest.mark.parametrize(
    ("limit_name", "used_name"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_available_memory_is_no_more_than_the_control_group_leaves(
    tmp_path: Path, limit_name: str, used_name: str
) -> None:
    """A container is not the machine; both versions of control groups are read."""
    write(tmp_path, "proc/meminfo", "MemAvailable:     700 kB\n")
    write(tmp_path, f"sys/fs/cgroup/{limit_name}", "400000\n")
    write(tmp_path, f"sys/fs/cgroup/{used_name}", "150000\n")
    assert find_available_bytes(torch.device("cpu"), root=tmp_path) == 250_000
    write(tmp_path, f"sys/fs/cgroup/{used_name}", "500000\n")
    assert find_available_bytes(torch.device("cpu"), root=tmp_path) == 0


def test_this_machine_has_memory() -> None:
    """The real files can be read."""
    assert find_available_bytes(torch.device("cpu")) > 0

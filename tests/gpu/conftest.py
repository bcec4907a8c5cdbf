"""Every test here runs on a GPU, marked `gpu`, and once more on the CPU with stand-ins for what is a GPU's."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.compile_kernels import list_kernels
from tests.gpu.side import Side
from tests.planner_process import PlannerProcess, run_planner


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "stand-in"])
def side(request: pytest.FixtureRequest) -> Side:
    """The GPU, or what stands in for one."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch finds no GPU")
        request.getfixturevalue("compiled_kernels")
        return Side(torch.device("cuda"))
    return Side(torch.device("cpu"))


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """A planner."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder, run_planner(Path(folder)) as planner:
        yield planner


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Lets FlashInfer compile its kernels, all at once: one after the other, when first used, takes minutes."""
    command = [sys.executable, "-m", "tests.gpu.compile_kernels"]
    root = Path(__file__).resolve().parent.parent.parent
    processes = [subprocess.Popen([*command, *arguments], cwd=root) for arguments in list_kernels()]
    for process in processes:
        # Whatever goes wrong shows in the tests that need the kernels.
        process.wait()

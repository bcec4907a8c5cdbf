"""Every test here runs on a GPU, marked `gpu`, and once more on the CPU with stand-ins for what is a GPU's."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.compile_kernels import compile_all
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
    """A planner, with its ring in memory as in service: CUDA registers no memory of a disk's file system."""
    with (
        tempfile.TemporaryDirectory(prefix="ringplan-", dir="/dev/shm") as folder,
        run_planner(Path(folder)) as planner,
    ):
        yield planner


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Kernels that are there already, as after `make test-gpu`'s first step, take seconds."""
    compile_all()

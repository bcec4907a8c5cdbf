"""Captures that CUDA refuses: nothing but the capture fails."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_service.cuda_graphs import CudaCapturer
from tests.gpu.side import Side


def run_what_cannot_be_captured() -> None:
    """A forward that looks at a result on the host is refused; run without a graph, it gives what it should."""
    device = torch.device("cuda")
    before, values = torch.cuda.current_stream(), torch.arange(5, device=device)

    def run() -> torch.Tensor:
        return values * int(values.sum())

    with pytest.raises(RuntimeError):
        CudaCapturer(device).capture(run)
    assert torch.cuda.current_stream() == before
    assert run().tolist() == [0, 10, 20, 30, 40]


def test_work_that_cannot_be_captured_leaves_the_stream_as_it_was(side: Side) -> None:
    """In a process of its own: torch is not made to capture again after a capture that has failed."""
    if not side.is_gpu:
        pytest.skip("only CUDA captures")
    code = "from tests.gpu.test_capture import run_what_cannot_be_captured as run; run()"
    root = Path(__file__).resolve().parent.parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=50)

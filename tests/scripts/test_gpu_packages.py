"""`scripts/gpu_packages.py`: what a GPU's tests need is named, and nothing is installed."""

import shutil
from importlib import metadata

import pytest
import torch

from scripts import gpu_packages


def test_requirements_are_those_of_the_engine_and_of_the_tests() -> None:
    """By name, with the versions that pyproject.toml allows; the package itself is none of them."""
    requirements = gpu_packages.list_requirements(has_tests=True)
    names = [gpu_packages.find_name(one) for one in requirements]
    assert {"torch", "transformers", "flashinfer-python", "grpcio", "pytest", "pytest-timeout", "hypothesis"} <= {
        *names
    }
    assert "ringplan" not in names
    assert any(one.startswith("torch>=") for one in requirements)
    assert "pytest" not in map(gpu_packages.find_name, gpu_packages.list_requirements(has_tests=False))


def test_only_what_is_not_installed_is_missing() -> None:
    """A requirement comes back as it was given."""
    requirements = ["numpy>=2.0,<3", "no-such-package>=1"]
    assert gpu_packages.find_missing(requirements) == ["no-such-package>=1"]


def test_a_missing_package_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with everything that pip is to be given."""

    def find_version(name: str) -> str:
        if name in {"flashinfer-python", "pytest-timeout"}:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", find_version)
    assert gpu_packages.main(["--tests"]) == 1
    line = capsys.readouterr().err
    assert "flashinfer-python>=" in line
    assert "pytest-timeout>=" in line
    assert "torch" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's version is told, and whether it could use one at all."""
    monkeypatch.setattr(gpu_packages, "find_missing", lambda _requirements: [])
    assert gpu_packages.main([]) == 1
    assert f"torch {torch.__version__}" in capsys.readouterr().err


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("cuda_home", [None, "/opt/cuda"])
@pytest.mark.parametrize(
    ("there", "absent"),
    [
        ({"nvcc", "ninja"}, None),
        ({"/opt/cuda/bin/nvcc", "/usr/local/cuda/bin/nvcc", "ninja"}, None),
        ({"ninja"}, "no nvcc"),
        ({"nvcc", "/opt/cuda/bin/nvcc"}, "no ninja"),
        (set(), "no nvcc and no ninja"),
    ],
)
def test_a_compiler_is_needed_where_no_package_brings_kernels(
    monkeypatch: pytest.MonkeyPatch, has_kernels: bool, cuda_home: str | None, there: set[str], absent: str | None
) -> None:
    """FlashInfer compiles at first use: without nvcc, where it looks for it, and ninja that fails in mid-run."""
    monkeypatch.setattr(gpu_packages.importlib.util, "find_spec", lambda _name: object() if has_kernels else None)

    def which(program: str, path: str | None = None) -> str | None:
        place = program if path is None else f"{path}/{program}"
        return place if place in there else None

    monkeypatch.setattr(shutil, "which", which)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    if cuda_home is not None:
        monkeypatch.setenv("CUDA_HOME", cuda_home)
        if there == {"nvcc", "ninja"}:
            absent = "no nvcc"  # FlashInfer looks nowhere else then.
    found = [fault for fault in gpu_packages.find_faults() if "compile" in fault]
    expected = [] if has_kernels or absent is None else [f"FlashInfer cannot compile its kernels: {absent}"]
    assert found == expected

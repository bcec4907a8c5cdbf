"""Says what is missing for the tests and the benchmark on a GPU; installs nothing.

Usage: `python scripts/gpu_packages.py [--tests]`. It exits with 0 if everything is there, and with 1 after a list of
what is not. It runs before anything else, so it uses the standard library alone, and torch where that is there.
"""

import importlib
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
# Of the extra "test" these; its others are for other tests.
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-timeout")
# FlashInfer compiles its kernels when they are first used, unless this package brings them.
KERNEL_PACKAGE = "flashinfer_jit_cache"
DEFAULT_CUDA_HOME = "/usr/local/cuda"


def list_requirements(*, has_tests: bool) -> list[str]:
    """Returns what the engine needs with CUDA, as pyproject.toml has it, and what the tests need if they are wanted."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["engine"], *extras["cuda"]]
    if has_tests:
        requirements += [one for one in extras["test"] if find_name(one) in TEST_PACKAGES]
    return [one for one in requirements if find_name(one) != project["name"]]


def find_name(requirement: str) -> str:
    """Returns a requirement's package."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def find_missing(requirements: Sequence[str]) -> list[str]:
    """Returns those requirements whose package is not installed; versions are left to pip."""
    missing = []
    for requirement in requirements:
        try:
            metadata.version(find_name(requirement))
        except metadata.PackageNotFoundError:
            missing.append(requirement)
    return missing


def find_faults() -> list[str]:
    """Returns what keeps installed packages from being used on a GPU."""
    torch = importlib.import_module("torch")
    faults = []
    if not torch.cuda.is_available():
        kind = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        faults.append(f"torch {torch.__version__} ({kind}) finds no GPU")
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        faults.append(f"flashinfer does not load: {error}")
    has_kernels = importlib.util.find_spec(KERNEL_PACKAGE) is not None
    absent = [name for name, place in (("nvcc", _find_nvcc()), ("ninja", shutil.which("ninja"))) if place is None]
    if absent and not has_kernels:
        faults.append(f"FlashInfer cannot compile its kernels: no {' and no '.join(absent)}")
    return faults


def _find_nvcc() -> str | None:
    """Returns CUDA's compiler as FlashInfer finds it, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        return shutil.which("nvcc") or shutil.which("nvcc", path=f"{DEFAULT_CUDA_HOME}/bin")
    return shutil.which("nvcc", path=f"{home}/bin")


def main(arguments: Sequence[str]) -> int:
    """Says what is missing; returns the exit code."""
    missing = find_missing(list_requirements(has_tests="--tests" in arguments))
    faults = [] if missing else find_faults()
    if missing:
        sys.stderr.write(f"missing packages, to be installed with pip: {' '.join(map(repr, missing))}\n")
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return 1 if missing or faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

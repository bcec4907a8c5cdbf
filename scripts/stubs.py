"""Makes the Python stubs of the protos, or checks that the committed ones are up to date.

Usage: `python scripts/stubs.py` writes them beside the protos; `python scripts/stubs.py --check` changes nothing and
fails when they differ from what the protos give.
"""

import filecmp
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Writes the stubs of every proto under `target`.

    Args:
        target: the folder that takes the package folders.
    """
    # The mypy plugins are installed beside the interpreter, which need not be on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{plugin}_out={target}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    status = protoc.main(["protoc", f"-I{PROTOS}", *outputs, *sources])
    if status != 0:
        sys.exit(status)


def list_stubs(folder: Path) -> set[Path]:
    """Returns the stubs under a folder, as paths relative to it."""
    return {path.relative_to(folder) for pattern in STUB_PATTERNS for path in folder.rglob(pattern)}


def find_differences() -> list[str]:
    """Returns a line for each committed stub that is missing, left over or different."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        wanted, committed = list_stubs(fresh), list_stubs(PROTOS)
        problems = [f"missing: protos/{stub}" for stub in wanted - committed]
        problems += [f"left over: protos/{stub}" for stub in committed - wanted]
        problems += [
            f"out of date: protos/{stub}"
            for stub in wanted & committed
            if not filecmp.cmp(fresh / stub, PROTOS / stub, shallow=False)
        ]
    return sorted(problems)


def main() -> None:
    """Runs the command."""
    if sys.argv[1:] == ["--check"]:
        problems = find_differences()
        sys.exit("\n".join([*problems, "run `make protos`"]) if problems else 0)
    if sys.argv[1:]:
        sys.exit(__doc__)
    generate(PROTOS)


if __name__ == "__main__":
    main()

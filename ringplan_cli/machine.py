"""What machine a measurement was made on."""

import os
import platform
from pathlib import Path

import numpy as np


def describe_machine() -> dict[str, str]:
    """Returns the processor, its cores that this process may use, the interpreter's and numpy's version."""
    return {
        "processor": _find_processor(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "python": f"Python {platform.python_version()}",
        "numpy": f"numpy {np.__version__}",
    }


def _find_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

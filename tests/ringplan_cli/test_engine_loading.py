"""The engine's packages, which the planner does without."""

import subprocess
import sys

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv[:] = ["ringplan", *sys.argv[1:]]
from ringplan_cli.__main__ import main
main()
"""


def test_engine_without_its_packages_tells_which_to_install() -> None:
    """Who installed the planner alone learns what the engine needs, without a traceback."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "engine"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: the engine needs the package torch: pip install 'ringplan[engine]'\n"


def test_other_commands_do_without_them() -> None:
    """The engine's help page is built from its settings, which need none of its packages."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "engine", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--num-pages" in result.stdout

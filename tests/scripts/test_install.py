"""How the installation shows where it is."""

import re
import subprocess
import sys

import pytest

from scripts import install
from scripts.install import describe, install_on_terminal

# As pip 26.3 prints them.
LINES = [
    ("Collecting transformers<6,>=5.0 (from ringplan==0.1.0)\n", "looking for transformers"),
    ("Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (from ringplan)\n", "found torch"),
    ("  Downloading grpcio-1.85.3-cp311-cp311-manylinux2014_x86_64.whl (7.4 MB)\n", "downloading grpcio, 7.4 MB"),
    ("Installing collected packages: mpmath, urllib3\n", "installing"),
    ("  Preparing metadata (pyproject.toml): finished with status 'done'\n", None),
]


@pytest.mark.parametrize(("line", "stage"), LINES)
def test_pips_lines_become_stages(line: str, stage: str | None) -> None:
    """A person sees what is being done, not how pip says it."""
    assert describe(line) == stage


def test_success_leaves_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What stays on the screen is that it is done; the percentage was shown meanwhile."""
    code = "print('  Downloading a-1.whl (9 MB)'); print('Progress 1 of 4')"
    assert install_on_terminal("Boats", [sys.executable, "-c", code]) == 0
    shown = capsys.readouterr().out
    assert "downloading a, 9 MB 25%" in shown
    assert re.fullmatch(r"Boats: done after \d+ s\n", shown.split("\033[2K")[-1])


def test_failure_shows_all_that_pip_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """When it fails, nothing of the reason is hidden."""
    code = "import sys; print('no such package'); print('really', file=sys.stderr); sys.exit(3)"
    assert install_on_terminal("Boats", [sys.executable, "-c", code]) == 3
    shown = capsys.readouterr().out
    assert "no such package\n" in shown
    assert "really\n" in shown
    assert "done" not in shown


def test_output_that_is_no_terminal_gets_pips_own() -> None:
    """A log has pip's lines, without anything that moves."""
    result = subprocess.run(
        [sys.executable, install.__file__, "Boats", "--help"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("Boats\n")
    assert "pip install" in result.stdout
    assert "\033" not in result.stdout

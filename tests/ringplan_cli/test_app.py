"""The command line as a whole."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ringplan_cli.app import COMMANDS, app

RUN_MAIN = "import sys; from ringplan_cli.__main__ import main; sys.argv[0] = 'ringplan'; main()"


def test_help_lists_every_command() -> None:
    """A person who types `ringplan --help` sees all there is."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """Each command has a help page, whose flags all say what they are for."""
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"ringplan {command}" in result.output or f"root {command}" in result.output


def test_unknown_command_is_a_usage_error() -> None:
    """A command that does not exist ends with exit status 2."""
    assert CliRunner().invoke(app, ["fly"]).exit_code == 2


def test_health_command_imports_nothing_heavy() -> None:
    """A probe that runs every few seconds must start fast: no torch, no numpy, no settings."""
    code = (
        "import sys; from ringplan_cli.app import app; from typer.testing import CliRunner;"
        "CliRunner().invoke(app, ['health', 'unix:/nonexistent/socket']);"
        "print([name for name in ('torch', 'transformers', 'numpy', 'pydantic_settings') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_command_error_is_one_line_and_an_exit_status() -> None:
    """What goes wrong is told in one line on standard error, without a traceback."""
    result = subprocess.run(
        [sys.executable, "-c", RUN_MAIN, "planner", "--ring-depth=1"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == ["error: --ring-depth: input should be greater than or equal to 2 (got '1')"]


def test_version_prints_our_own_version() -> None:
    """`ringplan version` names the distribution's version."""
    from importlib.metadata import version

    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output.splitlines()[0].split() == ["ringplan", version("ringplan")]

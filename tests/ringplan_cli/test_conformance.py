"""`ringplan conformance`: what it refuses before it asks any planner."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringplan_cli.app import app
from ringplan_cli.errors import CommandError

VECTOR = Path(__file__).parent.parent / "vectors" / "110_preplan_promoted.json"
NOBODY = ("--socket", "/nonexistent/socket")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "no plan vector: Invalid JSON"), ('{"name": "x"}', "no plan vector: page_size: Field required")],
)
def test_file_that_is_no_vector_is_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    """Exit status 2 before any planner is started or asked, and the message names the file."""
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    result = CliRunner().invoke(app, ["conformance", str(VECTOR), str(bad), *NOBODY])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith(f"{bad}: {message}")
    assert (result.exception.exit_code, result.output) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent"], "/nonexistent: cannot be read: No such file or directory"),
        (["{folder}"], "{folder}: no *.json in this folder"),
        (["{vector}", "--cache", "maybe"], "--cache: off (0), on (1) or verify (2) is allowed (got 'maybe')"),
        (["{vector}", "--socket", "host:1"], "--socket: 'host:1' is not a unix socket"),
    ],
)
def test_wrong_place_or_value_is_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Exit status 2, with the flag or the place and what is wrong with it."""
    places = {"folder": str(tmp_path), "vector": str(VECTOR)}
    result = CliRunner().invoke(app, ["conformance", *(argument.format(**places) for argument in arguments)])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith(message.format(**places))
    assert (result.exception.exit_code, result.output) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--ahead", "0"], "--ahead"), (["--ahead", "1025"], "--ahead"), (["--ring-depth", "1"], "--ring-depth")],
)
def test_number_out_of_range_is_a_usage_error(arguments: list[str], words: str) -> None:
    """Exit status 2, naming the flag."""
    result = CliRunner().invoke(app, ["conformance", str(VECTOR), *arguments, *NOBODY])
    assert result.exit_code == 2
    assert words in result.output


def test_vectors_are_required() -> None:
    """Nothing to replay is a usage error."""
    assert CliRunner().invoke(app, ["conformance"]).exit_code == 2


def test_planner_that_is_not_there_is_one_clear_line() -> None:
    """Exit status 1, at once: it does not wait for one to come."""
    result = CliRunner().invoke(app, ["conformance", str(VECTOR), *NOBODY])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception) == "no planner answers at unix:/nonexistent/socket"
    assert result.exception.exit_code == 1

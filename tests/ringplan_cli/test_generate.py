"""`ringplan generate` against an engine that is already there."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from ringplan.inference.v1 import inference_pb2
from ringplan_cli.app import app
from ringplan_cli.errors import BadSettingsError, CommandError
from ringplan_cli.inference_client import build_engine_target
from tests.ringplan_cli.fake_engine import Answer, FakeEngine, refuse, say, serve_fake_engine


def ask(folder: Path, answer: Answer, *arguments: str, stdin: str | None = None) -> tuple[Result, FakeEngine]:
    """Runs the command against an engine that answers in a given way."""
    with serve_fake_engine(folder, answer) as (target, engine):
        result = CliRunner().invoke(app, ["generate", "--target", target, *arguments], input=stdin)
    return result, engine


def test_answer_alone_goes_to_standard_output(tmp_path: Path) -> None:
    """What a pipe sees is the answer; all else goes to standard error."""
    result, engine = ask(tmp_path, say("Blue ", "sky."), "Why?")
    assert result.exit_code == 0
    assert result.stdout == "Blue sky.\n"
    assert "model: tiny" in result.stderr
    assert "tokens: 9 prompt + 2 answer" in result.stderr
    assert engine.requests[0].messages[0].content == "Why?"


def test_quiet_prints_the_answer_and_nothing_else(tmp_path: Path) -> None:
    """`--quiet` leaves standard error empty."""
    result, _ = ask(tmp_path, say("Blue."), "Why?", "--quiet")
    assert (result.stdout, result.stderr) == ("Blue.\n", "")


def test_a_path_alone_is_a_unix_socket(tmp_path: Path) -> None:
    """As `ringplan health` and `inspect` take it, also with characters that mean something in a URI."""
    folder = tmp_path / "50% of it?"
    folder.mkdir()
    with serve_fake_engine(folder, say("Blue.")) as (target, _):
        path = target.removeprefix("unix:")
        result = CliRunner().invoke(app, ["generate", "--target", path, "--quiet", "Why?"])
    assert result.stdout == "Blue.\n", result.exception


@pytest.mark.parametrize("target", ["localhost:50051", "dns:///localhost:50051", "ipv4:127.0.0.1:50051"])
def test_other_targets_go_to_grpc_as_they_are(target: str) -> None:
    """Only sockets are rewritten."""
    assert build_engine_target(target) == target


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("", "the target: no address is given"),
        ("dns:///", "dns:///: no address is given"),
        ("\udcff:50051", "\udcff:50051: not valid UTF-8"),
        ("/" + 107 * "x", f"/{107 * 'x'}: 108 bytes; a unix socket's path has at most 107"),
    ],
)
def test_a_target_that_can_be_nowhere_is_one_clear_line(target: str, fault: str) -> None:
    """It is told apart from an engine that is not there."""
    with pytest.raises(CommandError) as raised:
        build_engine_target(target)
    assert str(raised.value) == fault


def test_dash_reads_the_prompt_from_standard_input(tmp_path: Path) -> None:
    """A long prompt can come through a pipe."""
    _, engine = ask(tmp_path, say("x"), "-", stdin="from a pipe")
    assert engine.requests[0].messages[0].content == "from a pipe"


def test_answer_that_was_cut_off_says_so(tmp_path: Path) -> None:
    """A person learns that the limit, not the model, ended the answer, and which flag changes it."""
    result, _ = ask(tmp_path, say("a", reason=inference_pb2.FINISH_REASON_LENGTH), "Why?")
    assert "--max-tokens" in result.stderr


def test_refused_request_is_told_in_the_servers_words(tmp_path: Path) -> None:
    """Field and rule of a bad request reach the person, with exit status 2."""
    result, _ = ask(tmp_path, refuse(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: 2 is above 1"), "Why?")
    assert isinstance(result.exception, CommandError)
    assert str(result.exception) == "sampling.top_p: 2 is above 1"
    assert result.exception.exit_code == 2
    assert result.stdout == ""


def test_other_failures_name_target_and_status(tmp_path: Path) -> None:
    """A failure that is not the request's fault tells where and what."""
    result, _ = ask(tmp_path, refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"), "Why?")
    assert str(result.exception) == f"unix:{tmp_path}/engine.sock: the queue is full (RESOURCE_EXHAUSTED)"


def test_time_out_is_told_as_such(tmp_path: Path) -> None:
    """`--timeout-seconds` ends a call that takes too long."""
    result, _ = ask(tmp_path, refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "x"), "Why?", "--timeout-seconds", "30")
    assert str(result.exception) == f"unix:{tmp_path}/engine.sock did not finish in time"


def test_no_engine_tells_how_to_get_one(tmp_path: Path) -> None:
    """Nobody there is the likeliest mistake, so the message has the way out."""
    result = CliRunner().invoke(app, ["generate", "--target", f"unix:{tmp_path}/none.sock", "Why?"])
    assert isinstance(result.exception, CommandError)
    assert "ringplan serve" in str(result.exception)


def test_engine_flags_without_local_are_refused() -> None:
    """A flag that could have no effect is an error, not silence."""
    result = CliRunner().invoke(app, ["generate", "--num-pages", "9", "Why?"])
    assert isinstance(result.exception, BadSettingsError)
    assert str(result.exception) == "--num-pages needs --local"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300"])
def test_time_out_that_is_none_is_refused(seconds: str) -> None:
    """gRPC would take it for one that is over, and blame the engine."""
    result = CliRunner().invoke(app, ["generate", "--timeout-seconds", seconds, "Why?"])
    assert isinstance(result.exception, BadSettingsError)
    assert "--timeout-seconds" in str(result.exception)


@pytest.mark.parametrize("arguments", [["-"], [b"\xff\xfe"]])
def test_prompt_that_is_not_utf8_is_named_before_anything_starts(arguments: list[str | bytes]) -> None:
    """The person learns that it is the prompt, and waits for no model."""
    result = subprocess.run(
        [sys.executable, "-m", "ringplan_cli", "generate", "--local", *arguments],
        input=b"\xff\xfe",
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"error: the prompt is not valid UTF-8\n"


def test_full_disk_ends_the_answer_with_one_line(tmp_path: Path) -> None:
    """What cannot be written is told, not traced."""
    with serve_fake_engine(tmp_path, say("blue")) as (target, _), Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "ringplan_cli", "generate", "--quiet", "--target", target, "Why?"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr == b"error: the answer cannot be written: No space left on device\n"


def test_missing_prompt_is_a_usage_error() -> None:
    """Without a prompt there is nothing to ask."""
    assert CliRunner().invoke(app, ["generate"]).exit_code == 2


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07\x08", "\x9b31m"])
def test_control_characters_do_not_reach_a_terminal(text: str) -> None:
    """A model's words are not a terminal's commands; line breaks and tabs stay."""
    from ringplan_cli.commands.generate import make_printable

    shown = make_printable(f"a\n\tb{text}ü😀")
    assert shown.startswith("a\n\tb")
    assert shown.endswith("ü😀")
    assert not {"\x1b", "\x07", "\x08", "\x9b"} & set(shown)


def test_characters_that_a_terminal_cannot_show_do_not_end_the_answer(tmp_path: Path) -> None:
    """In an old encoding an emoji is a question mark, not a traceback."""
    with serve_fake_engine(tmp_path, say("blue 😀 sky")) as (target, _):
        result = subprocess.run(
            [sys.executable, "-m", "ringplan_cli", "generate", "--quiet", "--target", target, "Why?"],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        )
    assert result.stdout == b"blue ? sky\n"

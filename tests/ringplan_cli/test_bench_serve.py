"""`ringplan bench serve` against an engine that answers as a test tells it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.app import app
from ringplan_cli.errors import BadSettingsError, CommandError
from ringplan_cli.load.load_test import open_requests_file
from tests.ringplan_cli.fake_engine import Answer, FakeEngine, refuse, say, serve_fake_engine


def bench(folder: Path, answer: Answer, *arguments: str) -> tuple[Result, FakeEngine]:
    """Runs the command against an engine that answers in a given way."""
    with serve_fake_engine(folder, answer) as (target, engine):
        result = CliRunner().invoke(app, ["bench", "serve", "--target", target, "--rate", "inf", *arguments])
    return result, engine


def test_json_document_has_load_and_figures(tmp_path: Path) -> None:
    """The document says what was asked for and what came of it, and is strict JSON."""
    flags = "--requests 7 --seed 5 --prompt-tokens fixed:3 --ttft-target-seconds 60 --json"
    result, engine = bench(tmp_path, say("a", "b"), *flags.split())
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert document["requests"] == {
        "planned": 7,
        "sent": 7,
        "not_sent": 0,
        "cut_off": 0,
        "completed": 7,
        "refused": 0,
        "failed": 0,
    }
    assert (document["model"], document["answer_tokens"], document["prompt_tokens"]) == ("tiny", 14, 63)
    assert document["load"]["prompt_tokens"] == "fixed:3"
    assert (document["load"]["rate"], document["load"]["seed"], document["load"]["trace"]) == ("inf", 5, None)
    assert document["goodput"]["requests"] == 7
    assert document["latency_seconds"]["ttft"].keys() == {"count", "mean", "p50", "p90", "p95", "p99", "max"}
    assert document["was_stopped"] is False
    assert [len(request.token_ids.ids) for request in engine.requests] == [3] * 7
    assert all(2 not in request.token_ids.ids for request in engine.requests)


def test_same_seed_sends_the_same_requests(tmp_path: Path) -> None:
    """Whatever the engine answers."""
    flags = ("--requests", "9", "--guided-share", "0.5", "--samples-share", "0.5")
    _, one = bench(tmp_path, say("a"), *flags)
    _, other = bench(tmp_path, refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), *flags)

    def by_id(engine: FakeEngine) -> dict[str, pb.GenerateRequest]:
        return {request.request_id: request for request in engine.requests}

    assert by_id(one) == by_id(other)
    assert len(one.requests) == 9


def test_people_get_tables(tmp_path: Path) -> None:
    """Figures first, then latencies."""
    result, _ = bench(tmp_path, say("a", "b"), "--requests", "3")
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny: 3 requests, all at once"
    assert "3 of 3 sent" in lines[1]
    assert [line.split("  ")[0] for line in lines[-4:]] == [
        "first token",
        "inter-token",
        "longest gap",
        "end to end",
    ]


def test_refusals_are_counted_and_no_error(tmp_path: Path) -> None:
    """They are what a load test wants to see."""
    result, _ = bench(tmp_path, refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), "--requests", "4", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["refusals"] == {"RESOURCE_EXHAUSTED": 4}


def test_requests_file_can_be_sent_again_as_a_trace(tmp_path: Path) -> None:
    """The second test asks for what the first one asked for."""
    path = tmp_path / "requests.jsonl"
    _, one = bench(tmp_path, say("a"), "--requests", "5", "--requests-file", str(path))
    assert {json.loads(line)["outcome"] for line in path.read_text().splitlines()} == {"completed"}
    with serve_fake_engine(tmp_path, say("a")) as (target, other):
        result = CliRunner().invoke(app, ["bench", "serve", "--target", target, "--trace", str(path), "--json"])
    document = json.loads(result.stdout)
    assert document["load"] == {
        "guidance_scale": 1.5,
        "temperature": 0.0,
        "ignore_eos": True,
        "trace": str(path),
    }

    def prompts(engine: FakeEngine) -> list[list[int]]:
        return sorted(list(request.token_ids.ids) for request in engine.requests)

    assert prompts(other) == prompts(one)


def test_requests_too_long_for_the_model_are_shortened_and_told(tmp_path: Path) -> None:
    """A distribution with a long tail does not fill the report with refusals."""
    result, engine = bench(tmp_path, say("a"), "--requests", "2", "--prompt-tokens", "5000")
    assert [(len(request.token_ids.ids), request.stopping.max_tokens) for request in engine.requests] == [(2047, 1)] * 2
    assert "2 requests were shortened to the model's 2,048 tokens" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rate 0", "--rate: input should be greater than 0"),
        ("--prompt-tokens uniform:9-3", "--prompt-tokens: 'uniform:9-3': the smallest length comes first"),
        ("--rate inf", "rate 'inf' needs --requests"),
        ("--num-pages 9", "--num-pages needs --local"),
        ("--trace x.jsonl --seed 4", "--seed has no effect with --trace"),
        ("--trace /none/x.jsonl", "/none/x.jsonl: No such file"),
        ("--requests-file /none/x.jsonl", "--requests-file: /none/x.jsonl: No such file"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(flags: str, message: str) -> None:
    """One line that names the flag."""
    result = CliRunner().invoke(app, ["bench", "serve", *flags.split()])
    assert isinstance(result.exception, BadSettingsError)
    assert message in str(result.exception)


def test_no_engine_tells_how_to_get_one(tmp_path: Path) -> None:
    """As with the other commands."""
    result = CliRunner().invoke(app, ["bench", "serve", "--target", f"unix:{tmp_path}/none.sock"])
    assert isinstance(result.exception, CommandError)
    assert "ringplan serve" in str(result.exception)


def test_missing_matplotlib_is_told_before_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after an hour of load."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, engine = bench(tmp_path, say("a"), "--requests", "1", "--plots", str(tmp_path / "plots"))
    assert "ringplan[bench]" in str(result.exception)
    assert engine.requests == []


def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    """Two of three requests are due and ended when it comes; the third would be sent in an hour."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "requests.jsonl"
    trace.write_text(
        "\n".join(f'{{"arrival_seconds": {due}, "prompt_tokens": 4, "max_tokens": 2}}' for due in (0, 0, 3600))
    )
    command = [sys.executable, "-m", "ringplan_cli", "bench", "serve", "--json"]
    with serve_fake_engine(tmp_path, say("a", "b")) as (target, _):
        process = subprocess.Popen(
            [*command, "--target", target, "--trace", str(trace), "--requests-file", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not (path.exists() and len(path.read_text().splitlines()) == 2):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == b""
    document = json.loads(output)
    assert document["was_stopped"] is True
    assert (document["requests"]["completed"], document["requests"]["not_sent"]) == (2, 1)


def test_requests_file_is_not_needed(tmp_path: Path) -> None:
    """Without one nothing is written."""
    with open_requests_file(None) as write_record:
        assert callable(write_record)
    assert list(tmp_path.iterdir()) == []

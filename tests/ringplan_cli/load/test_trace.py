"""Traces are read with every line checked, and a requests file is one."""

import json
import re
from pathlib import Path

import pytest

from ringplan_cli.errors import BadSettingsError
from ringplan_cli.load.options import LoadOptions
from ringplan_cli.load.records import build_records
from ringplan_cli.load.schedule import LoadRequest, build_schedule
from ringplan_cli.load.trace import MEASURED_KEYS, TraceLine, read_trace


def write(folder: Path, *lines: str) -> Path:
    """Writes a trace."""
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_trace_gives_its_requests_in_the_order_of_arrival(tmp_path: Path) -> None:
    """Keys that are left out have their defaults; the line's number is the seed, so that prompts differ."""
    path = write(
        tmp_path,
        '{"arrival_seconds": 2, "text": "Why?", "max_tokens": 8, "seed": 5}',
        "",
        '{"arrival_seconds": 0.5, "prompt_tokens": 10, "max_tokens": 4, "n": 2, "guidance_tokens": [10, 3]}',
    )
    assert read_trace(path) == [
        LoadRequest(0.5, 3, 4, prompt_tokens=10, n=2, guidance_tokens=(10, 3)),
        LoadRequest(2.0, 5, 8, text="Why?"),
    ]


def test_requests_file_is_a_trace_of_the_same_load(tmp_path: Path) -> None:
    """What one test sent another can send again."""
    options = {"guided_share": 0.5, "guidance_contexts": 2, "samples_share": 0.5}
    requests = [*build_schedule(LoadOptions.model_validate(options)), LoadRequest(1e6, 8, 5, text="ü\n")]
    path = write(tmp_path, *(json.dumps(record.as_json()) for record in build_records(requests)))
    read = read_trace(path)
    assert [request.arrival_seconds for request in read] == pytest.approx(
        [request.arrival_seconds for request in requests], abs=1e-6
    )
    assert [(r.seed, r.prompt_tokens, r.text, r.max_tokens, r.n, r.guidance_tokens) for r in read] == [
        (r.seed, r.prompt_tokens, r.text, r.max_tokens, r.n, r.guidance_tokens) for r in requests
    ]


def test_requests_file_has_the_documented_keys() -> None:
    """The keys of a trace and the measured ones, no others, and all of them in docs/load-testing.md."""
    records = build_records([LoadRequest(0.0, 1, 2, prompt_tokens=3), LoadRequest(0.0, 1, 2, text="a")])
    keys = {key for record in records for key in record.as_json()}
    assert keys == set(TraceLine.model_fields) | MEASURED_KEYS
    page = (Path(__file__).parents[3] / "docs" / "load-testing.md").read_text()
    assert {key for key in keys if f"`{key}`" not in page} == set()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:1: no JSON"),
        ("[]", "trace.jsonl:1: not a JSON object"),
        ('{"prompt_tokens": 1, "max_tokens": 1}', "trace.jsonl:1: arrival_seconds: Field required"),
        ('{"arrival_seconds": 0, "max_tokens": 1}', "trace.jsonl:1: give either prompt_tokens or text"),
        (
            '{"arrival_seconds": 0, "max_tokens": 1, "prompt_tokens": 1, "text": "a"}',
            "trace.jsonl:1: give either prompt_tokens or text",
        ),
        ('{"arrival_seconds": -1, "max_tokens": 1, "text": "a"}', "trace.jsonl:1: arrival_seconds: "),
        ('{"arrival_seconds": NaN, "max_tokens": 1, "text": "a"}', "trace.jsonl:1: arrival_seconds: "),
        ('{"arrival_seconds": 0, "max_tokens": "9", "text": "a"}', "trace.jsonl:1: max_tokens: "),
        ('{"arrival_seconds": 0, "max_tokens": 1, "text": "a", "guidance_tokens": [0]}', "guidance_tokens.0: "),
        ('{"arrival_seconds": 0, "max_tokens": 1, "text": "a", "rate": 9}', "trace.jsonl:1: rate: Extra inputs"),
        ("", "a trace has 1 to 1,000,000 lines, not 0"),
    ],
)
def test_wrong_line_is_refused_with_its_number_and_key(tmp_path: Path, line: str, message: str) -> None:
    """A person finds the place at once."""
    with pytest.raises(BadSettingsError, match=re.escape(message)):
        read_trace(write(tmp_path, line))


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file is one clear line."""
    with pytest.raises(BadSettingsError, match=re.escape(f"{tmp_path}/none: No such file")):
        read_trace(tmp_path / "none")

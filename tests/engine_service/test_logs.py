"""How log records look."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from engine_service.logs import JsonFormatter, TextFormatter, configure_logs


@pytest.fixture
def _restored_logging() -> Iterator[None]:
    """Puts the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_record_is_one_object_a_line_with_its_extra_members() -> None:
    """A log collector gets the time in UTC, the level, the logger, the message and whatever the call added."""
    record = logging.makeLogRecord(
        {"created": 1.25, "msecs": 250.0, "levelname": "INFO", "name": "a.b", "msg": "hello %s", "args": ("w\n",)}
        | {"session": "s"}
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.250Z",
        "level": "info",
        "logger": "a.b",
        "message": "hello w\n",
        "session": "s",
    }


def test_a_json_record_carries_its_exception() -> None:
    """A traceback stays within its record."""
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert json.loads(JsonFormatter().format(record))["exception"].endswith("ValueError: why")


def test_what_a_caller_names_a_request_starts_no_line_of_its_own() -> None:
    """Nobody writes lines into the log, or moves an operator's cursor; a traceback keeps its lines."""
    name = "a\n2026-01-01 CRITICAL \x1b[2Jü\u2028\ud800"
    record = logging.makeLogRecord({"msg": "request %s ended", "args": (name,)})
    formatter = TextFormatter("%(message)s")
    assert formatter.format(record) == r"request a\n2026-01-01 CRITICAL \x1b[2Jü\u2028\ud800 ended"
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert formatter.format(record).startswith("failed\nTraceback ")


@pytest.mark.usefixtures("_restored_logging")
@pytest.mark.parametrize("as_json", [False, True])
def test_records_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Standard error gets what is important enough, once each, and standard output nothing."""
    configure_logs("debug", as_json=not as_json)
    configure_logs("warning", as_json=as_json)
    logger = logging.getLogger("engine_service.test")
    logger.info("quiet")
    logger.warning("loud")
    written = capsys.readouterr()
    assert written.out == ""
    (line,) = written.err.splitlines()
    assert "loud" in line
    assert line.startswith("{") is as_json

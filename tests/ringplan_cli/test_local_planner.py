"""A planner for one command: there from the first line of the `with` block to its end, and nothing stays."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_service.health import HealthCheckError, check
from ringplan_cli.errors import CommandError
from ringplan_cli.local_planner import LocalPlanner
from ringplan_cli.run_report import fetch_metrics

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary folders go to one of the test's own, and signal handlers are put back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_planner_serves_within_and_is_gone_after(tmp_path: Path) -> None:
    """It answers as soon as it has been entered; process, socket and folder end with it."""
    with LocalPlanner() as planner:
        assert check(planner.target, timeout_seconds=5.0)
        planner.check_running()
        assert fetch_metrics(planner.metrics_url).sum("ringplan_sessions") == 0
    with pytest.raises(HealthCheckError):
        check(planner.target, timeout_seconds=1.0)
    assert not list(tmp_path.iterdir())


def test_planner_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its log is in the message, and nothing stays."""
    monkeypatch.setenv("RINGPLAN_PLANNER_RING_DEPTH", "1")
    with pytest.raises(CommandError, match=r"the planner ended with exit status 2\n.*RINGPLAN_PLANNER_RING_DEPTH"):
        LocalPlanner().__enter__()
    assert not list(tmp_path.iterdir())


def test_request_to_end_is_obeyed_in_order(tmp_path: Path) -> None:
    """A signal ends the command with its own exit status, after the planner was stopped."""
    with pytest.raises(SystemExit) as end, LocalPlanner():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())

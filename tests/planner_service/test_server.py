"""What keeps a planner from starting; how it runs and ends is in tests/integration/test_planner_process.py."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_service import server
from planner_service.config import PlannerSettings
from planner_service.server import EXIT_CANNOT_START, run
from planner_service.unix_socket import SocketClaim


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path; the logs stay as the tests have them."""
    monkeypatch.setattr(server, "configure_logs", lambda *_, **__: None)
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir="/dev/shm") as path:
        yield Path(path)


def _make_settings(folder: Path, **settings: object) -> PlannerSettings:
    defaults: dict[str, object] = {"socket": folder / "p", "ring_dir": folder / "regions", "metrics_port": 0}
    return PlannerSettings.model_validate(defaults | settings)


def test_a_socket_in_use_keeps_a_planner_from_starting(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is logged in one line, and the first planner's files are untouched."""
    claim = SocketClaim(folder / "p")
    assert run(_make_settings(folder)) == EXIT_CANNOT_START
    (record,) = caplog.records
    assert "is in use by process" in record.getMessage()
    assert record.exc_info is None
    assert not (folder / "regions").exists()
    claim.release()


def test_a_ring_folder_that_others_can_enter_keeps_a_planner_from_starting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason names the folder, and the socket is given back."""
    (folder / "regions").mkdir(mode=0o755)
    assert run(_make_settings(folder)) == EXIT_CANNOT_START
    assert str(folder / "regions") in caplog.text
    assert [path.name for path in folder.iterdir()] == ["regions"]


def test_a_metrics_port_in_use_keeps_a_planner_from_starting(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason names the address, and the socket is given back."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(_make_settings(folder, metrics_port=port)) == EXIT_CANNOT_START
    assert f"127.0.0.1:{port}: Address already in use" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["regions"]


@pytest.mark.parametrize("host", ["256.0.0.1", "a..b", "x" * 64])
def test_a_metrics_host_that_is_none_keeps_a_planner_from_starting(
    folder: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """An address that cannot be resolved, or is no name at all, is an error, not a traceback."""
    assert run(_make_settings(folder, metrics_host=host)) == EXIT_CANNOT_START
    assert f"metrics cannot be served at {host}:0" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["regions"]


def test_a_socket_path_that_is_too_long_keeps_a_planner_from_starting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The path is named."""
    path = folder / ("x" * 100)
    assert run(_make_settings(folder, socket=path)) == EXIT_CANNOT_START
    assert str(path) in caplog.text

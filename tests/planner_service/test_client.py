"""The client connects to a unix socket and to nothing else, and says clearly when nobody is there."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from planner_service import client
from planner_service.client import PlannerClient, PlannerUnavailableError, parse_target
from tests.planner_service.planner_thread import PlannerThread


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("/run/planner.sock", "unix:/run/planner.sock"),
        ("unix:/run/planner.sock", "unix:/run/planner.sock"),
        ("unix:///run/planner.sock", "unix:/run/planner.sock"),
        ("/run/with:7/planner.sock", "unix:/run/with:7/planner.sock"),
        ("planner.sock", f"unix:{Path.cwd()}/planner.sock"),
        ("unix:planner.sock", f"unix:{Path.cwd()}/planner.sock"),
    ],
)
def test_a_target_is_a_path_with_or_without_its_scheme(target: str, address: str) -> None:
    """GRPC gets an absolute path, whatever the form it was given in."""
    assert parse_target(target) == address


@pytest.mark.parametrize(
    "target",
    ["", "unix:", "localhost:50051", "127.0.0.1:1", "[::1]:80", "dns:///planner:1", "http://x/y", "ipv4:1.2.3.4"],
)
def test_an_address_elsewhere_is_refused(target: str) -> None:
    """Plans come through shared memory, so a planner on a network is of no use."""
    with pytest.raises(ValueError, match="is not a unix socket"):
        parse_target(target)


def test_a_missing_socket_is_named(tmp_path: Path) -> None:
    """Where there is no socket the error says so, with its path."""
    with pytest.raises(PlannerUnavailableError, match="the socket does not exist") as caught:
        PlannerClient(str(tmp_path / "s"), connect_timeout_seconds=0.05)
    assert caught.value.target == f"unix:{tmp_path}/s"


def test_a_path_that_is_too_long_is_refused_at_once(tmp_path: Path) -> None:
    """The length is named, and nobody waits for a socket that cannot be."""
    with pytest.raises(PlannerUnavailableError, match="bytes; a unix socket's path has at most 107"):
        PlannerClient(str(tmp_path / ("s" * 108)), connect_timeout_seconds=600)


@pytest.mark.parametrize("name", ["100%", "a%41", "q?x=1", "a#b", "a b"])
def test_any_path_that_can_be_a_socket_can_be_connected_to(name: str) -> None:
    """GRPC reads an address as a URI: what would mean something in one is escaped on this side as on the planner's."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir="/dev/shm") as path:
        folder = Path(path) / name
        folder.mkdir(mode=0o700)
        planner = PlannerThread(folder)
        try:
            PlannerClient(str(planner.socket), connect_timeout_seconds=10).close()
            PlannerClient(f"unix:{planner.socket}", connect_timeout_seconds=10).close()
        finally:
            planner.stop()


def test_a_socket_that_nobody_serves_is_named(tmp_path: Path) -> None:
    """A file where nobody answers is told from no file at all."""
    (tmp_path / "s").touch()
    with pytest.raises(PlannerUnavailableError, match="the socket does not answer"):
        PlannerClient(str(tmp_path / "s"), connect_timeout_seconds=0.05)


def test_everything_an_engine_needs_is_exported() -> None:
    """The engine imports this module alone: every public name it offers is there, and listed in order."""
    assert all(hasattr(client, name) for name in client.__all__)
    needed = {"Segment", "CombinedLabel", "ForkRequest", "CacheMode", "PlanSource", "Plan", "SessionLostError"}
    assert needed <= set(client.__all__)


def test_importing_the_client_imports_no_server_and_no_torch() -> None:
    """An engine's process does not carry the planner's own parts."""
    code = "import sys, planner_service.client; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "prometheus_client", "planner_service.session", "planner_service.rpc"} & set(modules)

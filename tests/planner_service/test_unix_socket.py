"""Claims on unix sockets: who gets one, who is told what, and what is left behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner_service.errors import SocketInUseError, SocketPathError
from planner_service.unix_socket import MAX_PATH_BYTES, SocketClaim, build_target, find_fault

CLAIM_PROGRAM = """
import socket, sys, time
from planner_service.unix_socket import SocketClaim
claim = SocketClaim(sys.argv[1])
if sys.argv[2] == "listen":
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    server.listen()
print("claimed", flush=True)
time.sleep(60)
"""
LISTEN_PROGRAM = """
import socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listening", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path in a folder that is not made yet."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-") as parent:
        yield Path(parent) / "folder" / "planner.sock"


@contextmanager
def _running(program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program until the block ends; it has printed its line by then."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def _listen(claim: SocketClaim) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)

    def bind(target: str) -> None:
        server.bind(target.removeprefix("unix:"))
        server.listen()

    claim.bind(bind)
    return server


def test_a_socket_is_private_to_its_user(path: Path) -> None:
    """The socket has mode 0600 and its folder, made for it, 0700; the umask is as before."""
    previous = os.umask(0o022)
    claim = SocketClaim(path)
    with _listen(claim):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.umask(previous) == 0o022
    claim.release()


def test_a_release_leaves_nothing_and_may_be_repeated(path: Path) -> None:
    """Neither the socket nor the lock beside it stays, and the path can be claimed again."""
    claim = SocketClaim(path)
    with _listen(claim):
        claim.release()
        claim.release()
    assert list(path.parent.iterdir()) == []
    SocketClaim(path).release()


def test_a_release_spares_a_socket_that_is_not_its_own(path: Path) -> None:
    """If somebody has put another socket there meanwhile, it stays."""
    claim = SocketClaim(path)
    with _listen(claim), socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path) + ".new")
        Path(str(path) + ".new").rename(path)
        claim.release()
        assert path.exists()


def test_a_served_socket_is_refused_with_its_owner(path: Path) -> None:
    """The error names the process that serves it."""
    path.parent.mkdir()
    with _running(CLAIM_PROGRAM, path, "listen") as process:
        with pytest.raises(SocketInUseError, match=f"{path} is in use by process {process.pid}") as caught:
            SocketClaim(path)
        assert caught.value.pid == process.pid
        assert path.exists()


def test_a_socket_that_is_about_to_be_served_is_refused_with_its_owner(path: Path) -> None:
    """Of two planners that start at once, the second finds the first although it does not listen yet."""
    with _running(CLAIM_PROGRAM, path, "wait") as process, pytest.raises(SocketInUseError) as caught:
        SocketClaim(path)
    assert caught.value.pid == process.pid


def test_a_socket_of_a_program_without_claims_is_refused_with_its_owner(path: Path) -> None:
    """A server that knows nothing of claims is not robbed of its socket."""
    path.parent.mkdir()
    with _running(LISTEN_PROGRAM, path) as process:
        with pytest.raises(SocketInUseError) as caught:
            SocketClaim(path)
        assert caught.value.pid == process.pid
        assert not path.with_name("planner.sock.lock").exists()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))


def test_a_stale_socket_is_replaced(path: Path) -> None:
    """What a killed process left is no obstacle."""
    with _running(CLAIM_PROGRAM, path, "listen") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        claim = SocketClaim(path)
        with _listen(claim):
            claim.release()


def test_something_else_at_the_path_is_refused(path: Path) -> None:
    """A file is neither served nor removed."""
    path.parent.mkdir()
    path.write_text("keep me")
    with pytest.raises(SocketPathError, match="not a socket"):
        SocketClaim(path)
    assert path.read_text() == "keep me"


def test_the_longest_path_is_107_bytes() -> None:
    """A longer one is refused by name, in bytes and not in characters."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-") as parent:
        longest = Path(parent) / ("x" * (MAX_PATH_BYTES - len(parent) - 1))
        claim = SocketClaim(longest)
        with _listen(claim):
            claim.release()
        too_long = longest.with_name("é" + longest.name[1:])
        with pytest.raises(SocketPathError, match=r"108 bytes.*at most 107") as caught:
            SocketClaim(too_long)
        assert caught.value.path == str(too_long)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The error says what stands in the way."""
    (tmp_path / "file").touch()
    with pytest.raises(SocketPathError, match="folder cannot be made"):
        SocketClaim(tmp_path / "file" / "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    """In somebody else's folder the socket could be replaced by theirs."""
    path.parent.mkdir()
    os.chown(path.parent, 65_534, -1)
    with pytest.raises(SocketPathError, match="owned by user 65534"):
        SocketClaim(path)


def test_a_socket_that_cannot_be_made_is_a_clear_error(path: Path) -> None:
    """A failure to bind is told with the path, and the umask is as before."""
    claim = SocketClaim(path)

    def fail(target: str) -> None:
        raise RuntimeError(f"Failed to bind to address {target}")

    previous = os.umask(0o022)
    with pytest.raises(SocketPathError, match=f"{path}: the socket cannot be made"):
        claim.bind(fail)
    assert os.umask(previous) == 0o022
    claim.release()


@pytest.mark.parametrize("address", ["/run/planner.sock", Path("/" + 106 * "x"), "localhost:50051", "x" * 200 + ":1"])
def test_an_address_that_grpc_takes_has_no_fault(address: str | Path) -> None:
    """Paths of up to 107 bytes, and hosts of any length."""
    assert find_fault(address) is None


@pytest.mark.parametrize("address", ["/" + 107 * "x", "unix:/" + 107 * "x", Path("/" + 54 * "é")])
def test_a_path_that_no_socket_can_have_is_a_fault(address: str | Path) -> None:
    """It is bytes that count, without the scheme."""
    assert find_fault(address) in {f"{n} bytes; a unix socket's path has at most 107" for n in (108, 109)}


def test_a_host_that_no_name_can_have_is_a_fault() -> None:
    """What the command line took from bytes that are no UTF-8 may be a path, and nothing else."""
    assert find_fault("\udcff:50051") == "not valid UTF-8"
    assert find_fault("/\udcff") is None


@pytest.mark.parametrize("address", ["", "unix:"])
def test_no_address_is_a_fault(address: str) -> None:
    """It is told from a server that is not there."""
    assert find_fault(address) == "no address is given"


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("/run/planner.sock", "unix:/run/planner.sock"),
        ("unix:/run/planner.sock", "unix:/run/planner.sock"),
        ("unix:planner.sock", "unix:planner.sock"),
        (Path("/a b/100%?#.sock"), "unix:/a%20b/100%25%3F%23.sock"),
        (Path("/not utf-8: \udcff"), "unix:/not%20utf-8%3A%20%FF"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
    ],
)
def test_a_target_escapes_what_a_uri_would_misread(address: str | Path, target: str) -> None:
    """Paths become unix targets, with every special character percent-encoded (RFC 3986); TCP stays."""
    assert build_target(address) == target

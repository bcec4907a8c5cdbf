"""The right to serve a unix socket: one process at a time, stale files replaced, live ones never touched."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from planner_service.errors import SocketInUseError, SocketPathError

MAX_PATH_BYTES = 107  # sun_path has 108 bytes, the closing NUL included
_CONNECT_TIMEOUT_SECONDS = 2.0


def build_target(address: str | Path) -> str:
    """Returns the gRPC target of an address.

    Args:
        address: "unix:/path", a path alone if it has a slash, or "host:port", which is returned as it is.
    """
    text = str(address)
    if not text.startswith("unix:") and "/" not in text:
        return text
    # gRPC reads a target as a URI, in which a percent sign or a question mark in a path would mean something.
    return f"unix:{quote(os.fsencode(text.removeprefix('unix:')))}"


def find_fault(address: str | Path) -> str | None:
    """Returns what keeps an address from being one that `build_target` takes, or None.

    gRPC says so too, but with lines of its own on standard error.

    Args:
        address: as given to `build_target`.
    """
    path = str(address).removeprefix("unix:")
    if not path:
        return "no address is given"
    as_bytes = os.fsencode(path)
    if not build_target(address).startswith("unix:"):
        return None if as_bytes.decode(errors="replace") == path else "not valid UTF-8"
    if len(as_bytes) > MAX_PATH_BYTES:
        return f"{len(as_bytes)} bytes; a unix socket's path has at most {MAX_PATH_BYTES}"
    return None


class SocketClaim:
    """A socket path that this process alone may serve, until it releases it.

    The claim is a lock (`flock`) on a file beside the socket, so it ends with the process, however that ends.

    Args:
        path: where the socket is to be; its folder is made (mode 0700) if missing.

    Raises:
        SocketPathError: the path is too long, not a socket, or its folder cannot be used.
        SocketInUseError: another process serves the socket, or is about to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._served: tuple[int, int] | None = None
        self._descriptor: int | None = None
        _require_short(self.path)
        _prepare_folder(self.path)
        self._descriptor = self._lock()
        try:
            self._remove_stale()
        except BaseException:
            self.release()
            raise

    def bind(self, bind: Callable[[str], object]) -> None:
        """Has the socket made, for this user only.

        Args:
            bind: makes and listens on the socket of the gRPC target it is given.

        Raises:
            SocketPathError: `bind` failed, or made no socket.
        """
        # Set around the call, since a socket made wider and then narrowed could be connected to in between.
        previous = os.umask(0o177)
        try:
            bind(build_target(self.path))
            status = self.path.lstat()
        except (OSError, RuntimeError) as error:
            raise SocketPathError(str(self.path), f"the socket cannot be made ({error})") from error
        finally:
            os.umask(previous)
        self._served = (status.st_dev, status.st_ino)

    def release(self) -> None:
        """Removes the socket and gives the claim up. Idempotent."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == self._served:
                self.path.unlink()
        self._lock_path.unlink(missing_ok=True)
        os.close(descriptor)

    def _lock(self) -> int:
        """Locks the file beside the socket, and writes this process's pid into it."""
        while True:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SocketPathError(str(self._lock_path), f"cannot be made ({error.strerror})") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                try:
                    raise SocketInUseError(str(self.path), _find_server(self.path) or _read_pid(descriptor)) from error
                finally:
                    os.close(descriptor)
            # The file may have been removed by its last owner before it was locked here: a lock that nobody sees.
            if os.fstat(descriptor).st_nlink:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
            os.close(descriptor)

    def _remove_stale(self) -> None:
        """Removes a socket that nobody serves."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketPathError(str(self.path), "something that is not a socket stands there")
        pid = _find_server(self.path)
        if pid is not None:
            raise SocketInUseError(str(self.path), pid or None)
        self.path.unlink(missing_ok=True)


def _require_short(path: Path) -> None:
    fault = find_fault(path)
    if fault is not None:
        raise SocketPathError(str(path), fault)


def _prepare_folder(path: Path) -> None:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise SocketPathError(str(path), f"its folder cannot be made ({error.strerror})") from error
    # In a folder of somebody else's the socket could be replaced by theirs.
    if owner not in {0, os.geteuid()}:
        raise SocketPathError(str(path), f"its folder is owned by user {owner}, not by user {os.geteuid()} or root")


def _find_server(path: Path) -> int | None:
    """Returns the pid of the process that serves a socket: 0 if it cannot be told, None if nobody does.

    Raises:
        SocketPathError: the socket may not be connected to.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except PermissionError as error:
            raise SocketPathError(str(path), f"a socket that may not be connected to ({error.strerror})") from error
        except OSError:
            return 0  # It is served, by a process too busy to accept.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid


def _read_pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 20, 0)
    return int(text) if text.isdigit() else None

"""Takes the address an engine serves on."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from engine_service.errors import ListenError

UNIX_SCHEME = "unix:"
_PROBE_SECONDS = 1.0


def bind_address(listen: str, add_port: Callable[[str], int]) -> str:
    """Takes an address.

    Args:
        listen: "host:port", with port 0 for a free one, or "unix:/path".
        add_port: binds a server to it and returns the port; raises RuntimeError if that fails.

    Returns:
        The address, with the port that was taken.

    Raises:
        ListenError: it cannot be had.
    """
    target = listen
    if listen.startswith(UNIX_SCHEME):
        path = Path(listen.removeprefix(UNIX_SCHEME))
        _refuse_socket_in_use(listen, path)
        # gRPC reads a target as a URI, in which a percent sign or a question mark in a path would mean something.
        target = f"{UNIX_SCHEME}{quote(os.fsencode(path))}"
    try:
        port = add_port(target)
    except RuntimeError as error:
        raise ListenError(listen, "in use, or no address of this machine") from error
    return listen if listen.startswith(UNIX_SCHEME) else f"{listen.rpartition(':')[0]}:{port}"


def _refuse_socket_in_use(listen: str, path: Path) -> None:
    """Refuses a socket that somebody serves, and a file that is no socket: gRPC would take them away silently."""
    if path.exists() and not path.is_socket():
        raise ListenError(listen, "something that is not a socket stands there")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return
    raise ListenError(listen, "in use by another process")

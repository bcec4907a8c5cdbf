"""Rules of taking an address."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from engine_service.address import bind_address
from engine_service.errors import ListenError


def _with_server(test: Callable[[grpc.aio.Server], None]) -> None:
    async def main() -> None:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        test(server)
        await server.stop(None)

    asyncio.run(main())


def test_port_0_takes_a_free_one_and_says_which() -> None:
    """The address that comes back can be called."""

    def test(server: grpc.aio.Server) -> None:
        host, _, port = bind_address("127.0.0.1:0", server.add_insecure_port).rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port))):
            pass

    _with_server(test)


def test_port_in_use_is_refused_by_name() -> None:
    """Two servers never share a port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        def test(server: grpc.aio.Server) -> None:
            with pytest.raises(ListenError, match=address):
                bind_address(address, server.add_insecure_port)

        _with_server(test)


def test_socket_in_use_is_left_to_its_owner(tmp_path: Path) -> None:
    """A unix socket that somebody serves is refused, and goes on working."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()
        with pytest.raises(ListenError, match="in use"):
            bind_address(f"unix:{path}", lambda _address: 1)
        assert path.is_socket()


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    """What a killed engine left does not keep the next from starting."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))

    def test(server: grpc.aio.Server) -> None:
        assert bind_address(f"unix:{path}", server.add_insecure_port) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))

    _with_server(test)


@pytest.mark.parametrize("name", [b"100%41", b"what?", b"not utf-8: \xff"])
def test_socket_stands_where_it_was_asked_for(tmp_path: Path, name: bytes) -> None:
    """Whatever a file may be called a socket may be called too: gRPC's own escapes are not the caller's business."""
    path = tmp_path / os.fsdecode(name)

    def test(server: grpc.aio.Server) -> None:
        assert bind_address(f"unix:{path}", server.add_insecure_port) == f"unix:{path}"
        assert path.is_socket()

    _with_server(test)


def test_file_that_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    """Somebody's file is never removed."""
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ListenError, match="not a socket"):
        bind_address(f"unix:{path}", lambda _address: 1)
    assert path.read_text() == "mine"

"""`ringplan health`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from ringplan_cli.app import app
from ringplan_cli.errors import CommandError


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """A server of which one part serves and one does not."""
    servicer = health.HealthServicer()
    servicer.set("up", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("down", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    yield f"unix:{tmp_path}/socket"
    server.stop(None).wait()


def test_server_that_serves_is_healthy(target: str) -> None:
    """Exit status 0 says that it serves."""
    result = CliRunner().invoke(app, ["health", target, "--service", "up"])
    assert (result.exit_code, result.output) == (0, "serving\n")


@pytest.mark.parametrize(
    ("service", "reason"), [("down", "not serving"), ("unknown", "the server has no such service")]
)
def test_server_that_does_not_serve_is_not_healthy(target: str, service: str, reason: str) -> None:
    """Any other answer is exit status 1, and says which."""
    result = CliRunner().invoke(app, ["health", target, "--service", service])
    assert isinstance(result.exception, CommandError)
    assert (str(result.exception), result.exception.exit_code) == (f"{target}: {reason}", 1)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "no address is given"),
        ("/" + 107 * "x", f"/{107 * 'x'}: 108 bytes; a unix socket's path has at most 107"),
    ],
)
def test_what_is_no_address_is_not_healthy(capfd: pytest.CaptureFixture[str], target: str, message: str) -> None:
    """One line says what is wrong; gRPC, which writes to standard error by itself, is not asked."""
    result = CliRunner().invoke(app, ["health", target])
    assert str(result.exception) == message
    assert capfd.readouterr() == ("", "")


def test_nobody_there_is_not_healthy(tmp_path: Path) -> None:
    """No server is no health, without a long wait and without gRPC's own words."""
    result = CliRunner().invoke(app, ["health", f"unix:{tmp_path}/none"])
    assert str(result.exception) == f"unix:{tmp_path}/none: no server answers there"

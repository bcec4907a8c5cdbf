"""The health check as a client."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from planner_service.health import HealthCheckError, check
from planner_service.unix_socket import build_target

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path for a socket."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def servicer(path: Path) -> Iterator[health.HealthServicer]:
    """The reference health service, on the socket."""
    servicer = health.HealthServicer()
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_insecure_port(build_target(path))
        server.start()
        yield servicer
        server.stop(0).wait()


@pytest.mark.parametrize(("status", "is_serving"), [(Status.SERVING, True), (Status.NOT_SERVING, False)])
def test_a_check_says_whether_the_server_serves(
    path: Path, servicer: health.HealthServicer, status: Status.ServingStatus.ValueType, is_serving: bool
) -> None:
    """Serving is True, about to end is False; by path, by target, and for one service."""
    servicer.set("", status)
    servicer.set("a.Service", status)
    assert check(str(path), 10) is is_serving
    assert check(f"unix:{path}", 10) is is_serving
    assert check(str(path), 10, service="a.Service") is is_serving


def test_a_service_that_the_server_does_not_have_is_an_error(path: Path, servicer: health.HealthServicer) -> None:
    """A misspelt name is no bad health."""
    servicer.set("", Status.SERVING)
    with pytest.raises(HealthCheckError, match=str(path)) as caught:
        check(str(path), 10, service="none")
    assert caught.value.status == "NOT_FOUND"


def test_a_socket_that_nobody_serves_is_an_error(path: Path) -> None:
    """The error names the target, and does not wait for a server to come up."""
    with pytest.raises(HealthCheckError, match=str(path)) as caught:
        check(str(path), 30)
    assert (caught.value.target, caught.value.status) == (str(path), "UNAVAILABLE")


def test_a_server_that_does_not_answer_is_an_error(path: Path) -> None:
    """One that accepts and stays silent is given up after the time-out."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(HealthCheckError) as caught:
            check(str(path), 0.2)
    assert caught.value.status in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}


def test_a_check_imports_little() -> None:
    """A probe runs every few seconds: it loads none of what makes a planner or an engine slow to start."""
    program = "import sys, planner_service.health; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "transformers", "numpy", "pydantic", "prometheus_client"}.isdisjoint(modules)

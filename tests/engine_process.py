"""A real engine process for integration tests."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ringplan.inference.v1 import inference_pb2, inference_pb2_grpc

START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 120.0

# The settings come from the environment; `ringplan engine` does the same.
_COMMAND = """
import sys
from engine_service.config import EngineSettings
from engine_service.server import run
sys.exit(run(EngineSettings()))
"""


@dataclass
class EngineProcess:
    """An engine in a folder of its own: its socket and its log.

    Args:
        folder: where everything of it goes; short, since socket paths have at most 107 bytes.
        settings: its settings, by field name.
    """

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        """Its address."""
        return f"unix:{self.folder}/engine.sock"

    def launch(self) -> None:
        """Starts it and returns at once."""
        settings = {"listen": self.target, "metrics_port": 0, **self.settings}
        variables = {f"RINGPLAN_ENGINE_{name.upper()}": str(value) for name, value in settings.items()}
        with (self.folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND], env={**os.environ, **variables}, stdout=log, stderr=log
            )

    def start(self) -> None:
        """Starts it and returns once it serves."""
        self.launch()
        self.wait_until_health(is_serving=True, timeout_seconds=START_TIMEOUT_SECONDS)

    def wait_until_health(self, *, is_serving: bool, timeout_seconds: float = 90.0) -> None:
        """Returns once the health service says so."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_seconds
        while self.is_serving() != is_serving:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine never was serving={is_serving}:\n{self.read_log()}")
            time.sleep(0.05)

    def is_serving(self) -> bool:
        """Asks the health service, as a probe would."""
        with self.open_channel() as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code."""
        assert self.process is not None
        return self.process.wait(STOP_TIMEOUT_SECONDS)

    def terminate(self) -> None:
        """Asks it to end."""
        assert self.process is not None
        self.process.terminate()

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_SECONDS)

    def read_log(self) -> str:
        """Returns what it has logged."""
        return (self.folder / "engine.log").read_text(errors="replace")

    def read_metrics(self) -> str:
        """Returns its metrics page."""
        url = self.read_log().rpartition("metrics at ")[2].split()[0]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as page:
            return str(page.read().decode())

    def open_channel(self) -> grpc.Channel:
        """Returns a new connection to it."""
        return grpc.insecure_channel(self.target, options=(("grpc.use_local_subchannel_pool", 1),))

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_seconds: float = 60.0
    ) -> list[inference_pb2.GenerateResponse]:
        """Returns everything that comes in answer to a request."""
        with self.open_channel() as channel:
            return list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout_seconds))


@contextmanager
def run_engine(folder: Path, **settings: object) -> Iterator[EngineProcess]:
    """Runs an engine for the length of a `with` block, and leaves none behind."""
    engine = EngineProcess(folder, settings)
    try:
        engine.start()
        yield engine
    finally:
        if engine.process is not None and engine.process.poll() is None:
            engine.kill()


def read_token_ids(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    """Returns the tokens of an answer."""
    return [token_id for response in responses for token_id in response.delta.token_ids]

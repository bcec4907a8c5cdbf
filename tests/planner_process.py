"""A real planner process for integration tests."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from ringplan.planner.v1 import planner_pb2, planner_pb2_grpc

START_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 15.0

# The settings come from the environment; `ringplan planner` does the same.
_COMMAND = """
import sys
from planner_service.config import PlannerSettings
from planner_service.server import run
sys.exit(run(PlannerSettings()))
"""


@dataclass
class PlannerProcess:
    """A planner in a folder of its own: its socket, its regions and its log.

    Args:
        folder: where everything of it goes; short, since socket paths have at most 107 bytes.
        settings: further settings, by field name.
    """

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """Where it serves."""
        return self.folder / "planner.sock"

    @property
    def target(self) -> str:
        """Its address."""
        return f"unix:{self.socket}"

    @property
    def ring_dir(self) -> Path:
        """The folder of its regions."""
        return self.folder / "ring"

    def start(self) -> None:
        """Starts it and returns once it answers."""
        settings = {
            "socket": self.socket,
            "ring_dir": self.ring_dir,
            "metrics_port": 0,
            "shutdown_grace_seconds": 1,
            **self.settings,
        }
        variables = {f"RINGPLAN_PLANNER_{name.upper()}": str(value) for name, value in settings.items()}
        with (self.folder / "planner.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND], env={**os.environ, **variables}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                self.list_sessions(timeout_seconds=1.0)
                return
            except grpc.RpcError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the planner did not start:\n{self.read_log()}") from None
                time.sleep(0.02)

    def stop(self) -> int:
        """Asks it to end; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_SECONDS)

    def pause(self) -> None:
        """Stops it from running, without ending it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undoes `pause`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def read_log(self) -> str:
        """Returns what it has logged."""
        return (self.folder / "planner.log").read_text(errors="replace")

    def read_metrics(self) -> str:
        """Returns its metrics page."""
        url = self.read_log().rpartition("metrics at ")[2].split()[0]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as page:
            return str(page.read().decode())

    def list_sessions(self, timeout_seconds: float = 10.0) -> list[planner_pb2.SessionSummary]:
        """Returns its open sessions."""
        with self.open_channel() as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            return list(stub.ListSessions(planner_pb2.ListSessionsRequest(), timeout=timeout_seconds).sessions)

    def open_channel(self) -> grpc.Channel:
        """Returns a new connection to it."""
        return grpc.insecure_channel(self.target, options=(("grpc.use_local_subchannel_pool", 1),))


@contextmanager
def run_planner(folder: Path, **settings: object) -> Iterator[PlannerProcess]:
    """Runs a planner for the length of a `with` block, and leaves none behind."""
    planner = PlannerProcess(folder, settings)
    planner.start()
    try:
        yield planner
    finally:
        if planner.process is not None and planner.process.poll() is None:
            planner.kill()

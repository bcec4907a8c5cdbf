"""A real SMG gateway process for integration tests, called over HTTP as OpenAI's clients do."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 30.0
MODULE = "smg"
PROTO_MODULE = "smg_grpc_proto"


def is_smg_installed() -> bool:
    """Returns whether there is a gateway to run, and the messages that an engine needs for it."""
    return all(importlib.util.find_spec(name) is not None for name in (MODULE, PROTO_MODULE))


def find_free_port() -> int:
    """Returns a port that was free a moment ago; the gateway cannot choose one itself and tell it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class SmgProcess:
    """A gateway in front of engines.

    Args:
        folder: where its log goes.
        workers: the engines' addresses, host:port.
        port: where it serves.
        process: the process, once it is started.
    """

    folder: Path
    workers: Sequence[str]
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self, model: str) -> None:
        """Starts it and returns once every engine is ready and the model's tokenizer is loaded."""
        command = [sys.executable, "-m", MODULE, "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--worker-urls", *[f"grpc://{worker}" for worker in self.workers], "--policy", "round_robin"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(find_free_port())]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        command += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
        with (self.folder / "smg.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_for_workers(len(self.workers), START_TIMEOUT_SECONDS)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while self.post("/v1/completions", model=model, prompt="w5", max_tokens=1)[0] != 200:
            self._check(deadline)

    def wait_for_workers(self, num_ready: int, timeout_seconds: float) -> None:
        """Returns once so many engines are ready, and no more."""
        deadline = time.monotonic() + timeout_seconds
        while self._count_ready() != num_ready:
            self._check(deadline)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Sends a request; returns the status and the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Sends a request with `stream`; returns its server-sent events, and checks that the last one says so."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with _OPENER.open(request, timeout=60) as response:
            lines = [line.decode().strip() for line in response]
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        return [json.loads(event) for event in events[:-1]]

    def stop(self) -> None:
        """Ends it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_SECONDS)

    def read_log(self) -> str:
        """Returns what it has logged."""
        return (self.folder / "smg.log").read_text(errors="replace")

    def _count_ready(self) -> int | None:
        try:
            with _OPENER.open(f"http://127.0.0.1:{self.port}/workers", timeout=10) as response:
                workers = json.load(response)["workers"]
        except OSError:
            return None
        return sum(worker["status"] == "ready" for worker in workers)

    def _check(self, deadline: float) -> None:
        assert self.process is not None
        if self.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the gateway is not as it should be:\n{self.read_log()[-20_000:]}")
        time.sleep(0.1)


@contextmanager
def run_smg(folder: Path, workers: Sequence[str], model: str) -> Iterator[SmgProcess]:
    """Runs a gateway for the length of a `with` block, and leaves none behind."""
    gateway = SmgProcess(folder, workers)
    try:
        gateway.start(model)
        yield gateway
    finally:
        gateway.stop()


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

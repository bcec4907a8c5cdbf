"""A real Prometheus with the configuration and the rules that are shipped, for tests."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).resolve().parents[2] / "deploy/prometheus"
START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 30.0
# In place of the shipped intervals, so that a test sees in seconds what takes minutes elsewhere.
INTERVAL = "1s"


@dataclass
class PrometheusProcess:
    """A Prometheus in a folder of its own.

    Args:
        program: the `prometheus` to run.
        folder: where its configuration, data and log go.
        port: where it serves.
    """

    program: Path
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and returns once it is ready."""
        arguments = (
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        )
        with (self.folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen([self.program, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start:\n{(self.folder / 'prometheus.log').read_text()}")
            time.sleep(0.1)

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the `data` of an answer of the HTTP API."""
        query = urllib.parse.urlencode(parameters)
        try:
            with open_directly(f"{self.url}/api/v1/{path}?{query}") as response:
                document = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expr: str, at: float | None = None) -> list[Any]:
        """Returns the series of an instant query, at a time in seconds since 1970 or now."""
        data = self.get("query", query=expr, **({} if at is None else {"time": f"{at:.3f}"}))
        return list(data["result"]) if data["resultType"] == "vector" else [data["result"]]

    def find_alerts(self, name: str) -> list[dict[str, Any]]:
        """Returns the pending and firing alerts of a name."""
        return [alert for alert in self.get("alerts")["alerts"] if alert["labels"]["alertname"] == name]

    def stop(self) -> None:
        """Ends it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(STOP_TIMEOUT_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with open_directly(f"{self.url}/-/ready") as response:
                return bool(response.status == 200)
        except OSError:
            return False


def write_configuration(folder: Path, addresses: Mapping[str, str]) -> None:
    """Writes the shipped configuration and rules with other intervals and targets; all else stays.

    Args:
        folder: where to.
        addresses: the target of each container.
    """
    configuration = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    configuration["global"] |= {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    for static in (item for job in configuration["scrape_configs"] for item in job["static_configs"]):
        static["targets"] = [addresses[static["labels"]["container"]]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    rules = yaml.safe_load((SHIPPED / "rules.yaml").read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))


@contextmanager
def run_prometheus(program: Path, folder: Path, addresses: Mapping[str, str]) -> Iterator[PrometheusProcess]:
    """Runs a Prometheus for the length of a `with` block, and leaves none behind.

    Args:
        program: the `prometheus` to run.
        folder: an empty folder for it.
        addresses: the target of each container, as "host:port".
    """
    write_configuration(folder, addresses)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prometheus = PrometheusProcess(program, folder, port)
    try:
        prometheus.start()
        yield prometheus
    finally:
        prometheus.stop()


def open_directly(url: str) -> Any:
    """Opens an address without any proxy of the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10)

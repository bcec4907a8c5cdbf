"""`ringplan serve`, and `ringplan generate --local`, which supervises in the same way: real processes, a tiny model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner_service.health import HealthCheckError, check
from tests.engine_service.tiny_models import save_tiny_checkpoint

PATIENCE_SECONDS = 50.0
ENGINE_FLAGS = ["--num-pages=64", "--page-size=4", "--num-threads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads in no time and answers with noise."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


class Serve:
    """A running `ringplan serve`.

    Args:
        folder: where its sockets, regions and output go.
        flags: further flags.
    """

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.targets = {"planner": f"unix:{folder}/planner.sock", "engine": f"unix:{folder}/engine.sock"}
        self._log = folder / "log"
        with self._log.open("wb") as log:
            command = [
                *(sys.executable, "-m", "ringplan_cli", "serve", *flags),
                *(f"--listen={self.targets['engine']}", "--metrics-port=0", *ENGINE_FLAGS),
                *(f"--planner-socket={folder}/planner.sock", f"--planner-ring-dir={folder}/ring"),
                "--planner-metrics-port=0",
            ]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        """What it and its processes have printed."""
        return self._log.read_text()

    def is_serving(self, name: str) -> bool:
        """Returns whether the planner or the engine serves."""
        try:
            return check(self.targets[name], timeout_seconds=1.0)
        except HealthCheckError:
            return False

    def wait_until_ready(self) -> None:
        """Returns once both serve."""
        wait_until(lambda: self.is_serving("planner") and self.is_serving("engine"), lambda: self.output)

    def find_pid(self, name: str) -> int:
        """Returns the process of one of the two."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in pids if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        assert len(found) == 1
        return found[0]


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    """Waits for what must come, and fails if it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


@contextmanager
def serve(folder: Path, *flags: str) -> Iterator[Serve]:
    """Runs `ringplan serve` while the context lasts."""
    running = Serve(folder, list(flags))
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_both_serve_and_sigterm_stops_both(model: Path, tmp_path: Path) -> None:
    """A request to stop ends both in peace: exit status 0, and no socket stays."""
    with serve(tmp_path, f"--model={model}") as running:
        running.wait_until_ready()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_SECONDS) == 0
    assert "error:" not in running.output
    assert not list(tmp_path.glob("*.sock"))


def test_killed_planner_stops_the_engine(model: Path, tmp_path: Path) -> None:
    """If one is lost, the other does not stay behind, and the message says which was lost."""
    with serve(tmp_path, f"--model={model}", "--shutdown-grace-seconds=1") as running:
        running.wait_until_ready()
        os.kill(running.find_pid("planner"), signal.SIGKILL)
        assert running.process.wait(PATIENCE_SECONDS) == 1
        assert not running.is_serving("engine")
    assert "error: the planner was killed by SIGKILL" in running.output


def test_engine_that_cannot_start_stops_the_planner(tmp_path: Path) -> None:
    """A wrong model ends it all, with a message, instead of leaving a planner that waits for an engine."""
    with serve(tmp_path, f"--model={tmp_path}/none") as running:
        assert running.process.wait(PATIENCE_SECONDS) == 1
        assert not running.is_serving("planner")
    assert f"{tmp_path}/none" in running.output
    assert "error: the engine ended with exit status 1" in running.output


def test_wrong_setting_of_either_is_told_before_anything_starts(tmp_path: Path) -> None:
    """Flags of both are checked at once, each by the name it has here."""
    with serve(tmp_path, "--planner-ring-depth=0") as running:
        assert running.process.wait(PATIENCE_SECONDS) == 2
    assert running.output.startswith("error: --planner-ring-depth: ")


def test_local_generate_answers_reports_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """`generate --local` is the whole service for one answer: it ends with the table, and with nothing left behind."""
    command = [sys.executable, "-m", "ringplan_cli", "generate", "--local", f"--model={model}", *ENGINE_FLAGS]
    result = subprocess.run(
        [*command, "--raw", "--ignore-eos", "--max-tokens=5", "--cache-mode=on", "hello"],
        capture_output=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    report = result.stderr.decode()
    assert result.returncode == 0, report
    assert result.stdout
    for row in ("answer", "time to first token: ", "tokens/s: ", "plans made: ", " mismatches", "ring stalls: "):
        assert row in report
    assert " + 5 answer" in report
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_local_generate_that_is_ended_leaves_nothing(
    number: signal.Signals, status: int, model: Path, tmp_path: Path
) -> None:
    """Ctrl-C, a closed terminal and a request to end all stop both processes and remove the folder."""
    command = [sys.executable, "-m", "ringplan_cli", "generate", "--local", f"--model={model}", *ENGINE_FLAGS, "hello"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as running:
        wait_until(lambda: any(tmp_path.glob("*/engine.log")))
        running.send_signal(number)
        assert running.wait(PATIENCE_SECONDS) == status
    assert not list(tmp_path.iterdir())


def test_local_generate_shows_why_the_engine_did_not_start(tmp_path: Path) -> None:
    """The end of the engine's log is all that a person needs to see."""
    command = [sys.executable, "-m", "ringplan_cli", "generate", "--local", f"--model={tmp_path}/none", "hello"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "error: the engine ended with exit status 1" in result.stderr
    assert f"{tmp_path}/none" in result.stderr
    assert "Traceback" not in result.stderr

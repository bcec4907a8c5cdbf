"""Processes that are started, watched and stopped together: real ones, planners."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner_service.health import HealthCheckError, check
from ringplan_cli.supervisor import EndedProcess, StopRequest, Supervisor, wait_for_end

PATIENCE_SECONDS = 30.0

KILLED_SUPERVISOR = """
import sys, time
from ringplan_cli.supervisor import Supervisor
Supervisor().start("planner", sys.argv[1:])
print("started", flush=True)
time.sleep(60)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what must come, and fails if it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_serving(socket: Path) -> bool:
    """Returns whether a planner serves."""
    try:
        return check(f"unix:{socket}", timeout_seconds=1.0)
    except HealthCheckError:
        return False


def build_planner_flags(folder: Path) -> list[str]:
    """Returns flags of a planner that lives in a folder."""
    return [f"--socket={folder}/planner.sock", f"--ring-dir={folder}/ring", "--metrics-port=0"]


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A supervisor whose processes end with the test."""
    made = Supervisor()
    yield made
    made.stop(timeout_seconds=10.0)


def test_running_processes_have_not_ended(supervisor: Supervisor, tmp_path: Path) -> None:
    """While all is well there is nothing to report."""
    supervisor.start("planner", build_planner_flags(tmp_path))
    wait_until(lambda: is_serving(tmp_path / "planner.sock"))
    assert supervisor.find_ended() is None


def test_process_that_cannot_start_is_found_with_its_status(supervisor: Supervisor, tmp_path: Path) -> None:
    """A process that ends by itself is named, with its exit status, and what it printed is at hand."""
    with (tmp_path / "log").open("wb") as log:
        supervisor.start("planner", ["--ring-depth=1"], log)
    wait_until(lambda: supervisor.find_ended() is not None)
    assert supervisor.find_ended() == EndedProcess("planner", 2)
    assert "--ring-depth" in (tmp_path / "log").read_text()


def test_stop_ends_processes_in_peace(supervisor: Supervisor, tmp_path: Path) -> None:
    """A stopped planner removes its socket, and needs no killing."""
    supervisor.start("planner", build_planner_flags(tmp_path))
    wait_until(lambda: is_serving(tmp_path / "planner.sock"))
    assert supervisor.stop(timeout_seconds=PATIENCE_SECONDS) == []
    assert supervisor.find_ended() == EndedProcess("planner", 0)
    assert not (tmp_path / "planner.sock").exists()


def test_process_that_does_not_stop_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    """A process that hangs does not keep the supervisor, and is named."""
    supervisor.start("planner", build_planner_flags(tmp_path))
    wait_until(lambda: is_serving(tmp_path / "planner.sock"))
    os.kill(find_child_pid(), signal.SIGSTOP)
    assert supervisor.stop(timeout_seconds=0.2) == [EndedProcess("planner", -signal.SIGKILL)]


def test_processes_are_out_of_reach_of_the_terminals_signals(supervisor: Supervisor, tmp_path: Path) -> None:
    """Ctrl-C goes to the supervisor's process group; its processes, in their own, are stopped in order."""
    supervisor.start("planner", build_planner_flags(tmp_path))
    wait_until(lambda: is_serving(tmp_path / "planner.sock"))
    assert os.getpgid(find_child_pid()) != os.getpgid(0)


def test_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    """The kernel tells the processes when their supervisor is gone, however it went."""
    command = [sys.executable, "-c", KILLED_SUPERVISOR, *build_planner_flags(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as killed:
        wait_until(lambda: is_serving(tmp_path / "planner.sock"))
        killed.kill()
    wait_until(lambda: not is_serving(tmp_path / "planner.sock") and not (tmp_path / "planner.sock").exists())


def test_process_whose_supervisor_is_gone_already_does_not_start(tmp_path: Path) -> None:
    """A supervisor that was killed before its process could ask the kernel leaves nothing behind either."""
    command = [sys.executable, "-m", "ringplan_cli", "planner", "--supervisor-pid=1", *build_planner_flags(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: the supervisor, process 1, is gone\n"


def test_signal_ends_the_wait(supervisor: Supervisor) -> None:
    """SIGTERM is a request to stop, not an end; afterwards it is what it was before."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_end(supervisor, stop) is None
        assert stop.num_signals == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_ended_process_ends_the_wait(supervisor: Supervisor) -> None:
    """A process that ends by itself is what the wait returns."""
    supervisor.start("planner", ["--ring-depth=1"], None)
    with StopRequest() as stop:
        assert wait_for_end(supervisor, stop) == EndedProcess("planner", 2)


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (EndedProcess("engine", 3), "the engine ended with exit status 3"),
        (EndedProcess("planner", -9), "the planner was killed by SIGKILL"),
    ],
)
def test_ended_process_reads_as_a_sentence(ended: EndedProcess, text: str) -> None:
    """What a person is told names the process and how it ended."""
    assert str(ended) == text


def find_child_pid() -> int:
    """Returns the `ringplan` process that this process has started."""
    pids = [pid for children in Path("/proc/self/task").glob("*/children") for pid in children.read_text().split()]
    found = [int(pid) for pid in pids if b"ringplan_cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]

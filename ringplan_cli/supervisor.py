"""Starts the planner and the engine as processes, notices when one ends, and stops them in order."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class EndedProcess:
    """A process that has ended.

    Args:
        name: which one.
        status: its exit status, or minus the signal that killed it.
    """

    name: str
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"the {self.name} was killed by {signal.Signals(-self.status).name}"
        return f"the {self.name} ended with exit status {self.status}"


class Supervisor:
    """The processes of one command, each a `ringplan` command of its own.

    Each runs in a process group of its own: Ctrl-C in a terminal reaches the supervisor alone, which then stops them
    in order. They end with the supervisor, even if that is killed.
    """

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str], output: IO[bytes] | None = None) -> None:
        """Starts `ringplan NAME ARGUMENTS`. To be called from the thread that lives as long as the supervisor.

        Args:
            name: the command, which is also the process's name in messages.
            arguments: its flags.
            output: takes what it prints; the supervisor's own output if None.
        """
        command = [sys.executable, "-P", "-m", "ringplan_cli", name, f"--supervisor-pid={os.getpid()}", *arguments]
        self._processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT, process_group=0
        )

    def pid_of(self, name: str) -> int:
        """Returns the process id of a process that was started."""
        return self._processes[name].pid

    def find_ended(self) -> EndedProcess | None:
        """Returns a process that has ended, or None while all run."""
        for name, process in self._processes.items():
            status = process.poll()
            if status is not None:
                return EndedProcess(name, status)
        return None

    def stop(self, timeout_seconds: float, stop: "StopRequest | None" = None) -> list[EndedProcess]:
        """Stops what still runs, the last started first, and waits for it.

        Args:
            timeout_seconds: how long each may take to end after SIGTERM; then it is killed.
            stop: signals that come meanwhile are handed on, which ends a process at once.

        Returns:
            Those that had to be killed.
        """
        killed = []
        for name, process in reversed(self._processes.items()):
            if process.poll() is None and not _stop_process(process, timeout_seconds, stop):
                killed.append(EndedProcess(name, process.returncode))
        return killed


class StopRequest:
    """SIGTERM, SIGINT and SIGHUP as something to look at, while the context lasts.

    Attributes:
        num_signals: how many have come.
    """

    def __init__(self) -> None:
        self.num_signals = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # As `signal` returned it.

    def _count(self, _number: int, _frame: object) -> None:
        self.num_signals += 1


def wait_for_end(supervisor: Supervisor, stop: StopRequest) -> EndedProcess | None:
    """Waits until a process ends by itself or a signal asks to stop.

    Args:
        supervisor: of the processes.
        stop: the signals.

    Returns:
        The process that ended, or None if a signal came first.
    """
    while stop.num_signals == 0:
        ended = supervisor.find_ended()
        if ended is not None:
            return ended
        time.sleep(POLL_SECONDS)
    return None


def _stop_process(process: subprocess.Popen[bytes], timeout_seconds: float, stop: StopRequest | None) -> bool:
    """Stops one process; returns whether it ended by itself."""
    process.send_signal(signal.SIGTERM)
    num_handed_on = stop.num_signals if stop else 0
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return True
        if stop and stop.num_signals > num_handed_on:
            num_handed_on = stop.num_signals
            process.send_signal(signal.SIGTERM)
    process.kill()
    process.wait()
    return False

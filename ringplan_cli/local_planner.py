"""A planner for one command: started in a temporary folder and stopped with it."""

import re
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from planner_service.health import HealthCheckError, check
from ringplan_cli.errors import CommandError
from ringplan_cli.settings_flags import build_arguments
from ringplan_cli.supervisor import Supervisor

POLL_SECONDS = 0.02
STOP_SECONDS = 10.0
NUM_LOG_LINES = 15


class LocalPlanner:
    """A planner process, from `with` to its end. To be entered in the main thread.

    Attributes:
        target: where it serves.
    """

    def __init__(self) -> None:
        self._supervisor = Supervisor()
        self._resources = ExitStack()

    def __enter__(self) -> "LocalPlanner":
        try:
            self._start()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._supervisor.pid_of("planner")

    @property
    def metrics_url(self) -> str:
        """Where it serves its metrics, from its log."""
        found = re.search(r"metrics at (\S+)", self._log.read_text(errors="replace"))
        assert found is not None, "a planner that serves has said where its metrics are"
        return found[1]

    def check_running(self) -> None:
        """Makes sure that it runs.

        Raises:
            CommandError: it has ended; the message has the end of its log.
        """
        ended = self._supervisor.find_ended()
        if ended is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            raise CommandError(f"{ended}" + "".join(f"\n  {line}" for line in lines))

    def _start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _end)
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="ringplan-")))
        self._resources.callback(self._supervisor.stop, STOP_SECONDS)
        self._log = folder / "planner.log"
        self.target = f"unix:{folder}/planner.sock"
        settings = {
            "socket": f"{folder}/planner.sock",
            "capture_dir": f"{folder}/captures",
            "metrics_host": "127.0.0.1",
            "metrics_port": "0",
        }
        with self._log.open("wb") as log:
            self._supervisor.start("planner", build_arguments(settings), log)
        while not self._is_serving():
            self.check_running()
            time.sleep(POLL_SECONDS)

    def _is_serving(self) -> bool:
        try:
            return check(self.target, timeout_seconds=1.0)
        except HealthCheckError:
            return False


def _end(number: int, _frame: object) -> NoReturn:
    """Ends the command as its signal would, but in order: the planner is stopped first."""
    sys.exit(128 + number)

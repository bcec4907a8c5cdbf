"""A planner and an engine for one command: started in a temporary folder, watched, and stopped with it."""

import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from planner_service.health import HealthCheckError, check
from ringplan_cli.errors import CommandError
from ringplan_cli.progress import ProgressFile, ShowStep
from ringplan_cli.settings_flags import build_arguments
from ringplan_cli.supervisor import EndedProcess, Supervisor

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
NUM_LOG_LINES = 15


class LocalStack:
    """Both processes, from `with` to its end. To be entered in the main thread.

    Args:
        engine_settings: settings of the engine that are not the default, as flags would give them.
        planner_settings: the same for the planner.

    Attributes:
        target: where the engine serves.
        planner_metrics_url: where the planner's metrics are.
        engine_metrics_url: where the engine's metrics are.
    """

    def __init__(
        self, engine_settings: Mapping[str, str | bool], planner_settings: Mapping[str, str | bool] | None = None
    ) -> None:
        self._engine_settings = dict(engine_settings)
        self._planner_settings = dict(planner_settings or {})
        self._supervisor = Supervisor()
        self._resources = ExitStack()

    def __enter__(self) -> "LocalStack":
        try:
            self._start_both()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        return self._supervisor.pid_of("engine")

    def wait_until_ready(self, name: str, show: ShowStep) -> None:
        """Waits until a process serves.

        Args:
            name: "planner" or "engine".
            show: called again and again with what the process is doing, if it tells.

        Raises:
            CommandError: one of the processes ended instead; the message has the end of its log.
        """
        while not self._is_serving(name):
            self.check_running()
            step = self._progress.try_read() if name == "engine" else None
            if step is not None:
                show(step)
            time.sleep(POLL_SECONDS)

    def check_running(self) -> None:
        """Makes sure that both processes run.

        Raises:
            CommandError: one has ended; the message has the end of its log.
        """
        ended = self._supervisor.find_ended()
        if ended is not None:
            raise CommandError(f"{ended}{self._read_end_of_log(ended)}")

    def _start_both(self) -> None:
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="ringplan-")))
        self._resources.callback(self._supervisor.stop, STOP_SECONDS)
        planner_target, self.target = f"unix:{folder}/planner.sock", f"unix:{folder}/engine.sock"
        planner_port, engine_port = _find_free_ports(2)
        self.planner_metrics_url = f"http://{HOST}:{planner_port}/metrics"
        self.engine_metrics_url = f"http://{HOST}:{engine_port}/metrics"
        self._targets = {"planner": planner_target, "engine": self.target}
        self._logs = {name: folder / f"{name}.log" for name in self._targets}
        self._progress = ProgressFile(folder / "engine.progress")
        self._planner_settings |= {
            "socket": f"{folder}/planner.sock",
            "metrics_host": HOST,
            "metrics_port": str(planner_port),
        }
        self._engine_settings |= {
            "listen": self.target,
            "planner": planner_target,
            "metrics_host": HOST,
            "metrics_port": str(engine_port),
            "progress_file": f"{folder}/engine.progress",
        }
        self._start("planner", self._planner_settings)
        self._start("engine", self._engine_settings)

    def _start(self, name: str, settings: Mapping[str, str | bool]) -> None:
        with self._logs[name].open("wb") as log:
            self._supervisor.start(name, build_arguments(settings), log)

    def _is_serving(self, name: str) -> bool:
        try:
            return check(self._targets[name], timeout_seconds=1.0)
        except HealthCheckError:
            return False

    def _read_end_of_log(self, ended: EndedProcess) -> str:
        lines = self._logs[ended.name].read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def _find_free_ports(num_ports: int) -> list[int]:
    """Returns TCP ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(num_ports)]
        return [server.getsockname()[1] for server in sockets]

"""The process that runs the yardsticks of `ringplan bench engine`."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_service.config import EngineSettings
from ringplan_cli.errors import CommandError

NUM_LOG_LINES = 5


class YardstickProcess:
    """`engine_service.yardstick_process`, from `with` to its end.

    Args:
        settings: what the engine runs with; model, type and threads are the same here.
        log: takes what the process prints.

    Attributes:
        facts: what it says of itself: its threads and its torch.
    """

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        self._log = log
        self._settings = {
            "model": settings.model,
            "dtype": settings.dtype,
            "num_threads": settings.num_threads,
            "model_cache_dir": str(settings.model_cache_dir) if settings.model_cache else None,
            "packs_weights": settings.pack_weights,
        }

    def __enter__(self) -> "YardstickProcess":
        command = [sys.executable, "-P", "-m", "engine_service.yardstick_process"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                process_group=0,
            )
        try:
            self.facts = self._ask(self._settings)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def time_generate(
        self, prompts: Sequence[Sequence[int]], num_new: Sequence[int], batch_size: int, *, is_continuous: bool = False
    ) -> float:
        """Returns the seconds that transformers' `generate` takes in static batches, or its continuous batching."""
        request = {"prompts": [list(prompt) for prompt in prompts], "num_new": list(num_new), "batch_size": batch_size}
        method = "continuous" if is_continuous else "generate"
        return float(self._ask({"method": method, **request})["seconds"])

    def time_forward(self, num_rows: int, num_past_tokens: int, num_steps: int) -> float:
        """Returns the median seconds of a decode step of the bare model."""
        request = {"num_rows": num_rows, "num_past_tokens": num_past_tokens, "num_steps": num_steps}
        return float(self._ask({"method": "forward", **request})["seconds"])

    def _stop(self) -> None:
        self._process.kill()
        # What had not been written yet has nobody to go to.
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            end = "".join(f"\n  {text}" for text in self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])
            raise CommandError(f"the process with the yardsticks ended{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

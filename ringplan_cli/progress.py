"""How far a process has come with its start, told to its supervisor through a file and shown to a person."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn


class Step(NamedTuple):
    """What a process is doing, and how far it is with it, from 0 to 1."""

    stage: str
    share: float


class ShowStep(Protocol):
    """Shows a step to a person."""

    def __call__(self, step: Step) -> None:
        """Shows it."""


class ProgressFile:
    """A file with one line for each step, written by one process and read by another.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, stage: str, share: float) -> None:
        """Adds a step.

        Args:
            stage: what is being done.
            share: how far it is, from 0 to 1.
        """
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([stage, share]) + "\n")

    def try_read(self) -> Step | None:
        """Returns the last step, or None if there is none yet."""
        if not self._path.exists():
            return None
        # What follows the last line's end is still being written.
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        return Step(*json.loads(lines[-1])) if lines else None


@contextmanager
def show_steps(console: Console, name: str) -> Iterator[ShowStep]:
    """Shows steps while the context lasts: as a moving bar on a terminal, elsewhere as one line a stage.

    Args:
        console: where to.
        name: whose steps they are.

    Yields:
        What shows a step.
    """
    if not console.is_terminal or console.quiet:
        yield _PlainSteps(console, name)
        return
    columns = (SpinnerColumn(), TextColumn(f"[dim]{name}: {{task.description}}[/]"), BarColumn(bar_width=24))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(step: Step) -> None:
            # A bar that stands at 0 says less than one that moves.
            total = 1.0 if step.share > 0 else None
            progress.update(task, description=step.stage, completed=step.share, total=total)

        yield show


class _PlainSteps:
    """Prints a line whenever the stage changes."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name, self._last = console, name, ""

    def __call__(self, step: Step) -> None:
        if step.stage != self._last:
            self._last = step.stage
            self._console.print(f"{self._name}: {step.stage}", markup=False)

"""Both processes for the length of one command, with what a person sees while they start."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console

from ringplan_cli.local_stack import LocalStack
from ringplan_cli.progress import show_steps


@contextmanager
def run_local_stack(notes: Console, engine_settings: Mapping[str, Any]) -> Iterator[LocalStack]:
    """Starts a planner and an engine, shows how far they are, and stops them in the end, whatever ends the command.

    Args:
        notes: where to show it.
        engine_settings: settings of the engine that are not the default, as flags would give them.

    Yields:
        The processes, ready.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    started = time.monotonic()
    with LocalStack(engine_settings) as stack:
        for name in ("planner", "engine"):
            with show_steps(notes, name) as show:
                stack.wait_until_ready(name, show)
            notes.print(f"[dim]{name}: ready after {time.monotonic() - started:.1f} s[/]")
        yield stack


def _end(number: int, _frame: object) -> NoReturn:
    """Ends the command as its signal would, but in order: what was started is stopped first."""
    sys.exit(128 + number)

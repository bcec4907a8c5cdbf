"""How far a start has come."""

import io
from pathlib import Path

from rich.console import Console

from ringplan_cli.progress import ProgressFile, Step, show_steps


def test_reader_sees_the_last_step(tmp_path: Path) -> None:
    """What counts is where the process is now."""
    file = ProgressFile(tmp_path / "progress")
    assert file.try_read() is None
    file.write("loading", 0.25)
    file.write("loading", 0.5)
    assert file.try_read() == Step("loading", 0.5)


def test_reader_ignores_a_line_that_is_being_written(tmp_path: Path) -> None:
    """Half a line is not read."""
    file = ProgressFile(tmp_path / "progress")
    file.write("loading", 0.5)
    with (tmp_path / "progress").open("a") as half:
        half.write('["rea')
    assert file.try_read() == Step("loading", 0.5)


def test_plain_output_has_a_line_for_each_stage() -> None:
    """In a log, a stage is told once, however often it is shown."""
    output = io.StringIO()
    with show_steps(Console(file=output), "engine") as show:
        for stage, share in (("reading", 0.0), ("reading", 0.5), ("checking", 0.0)):
            show(Step(stage, share))
    assert output.getvalue() == "engine: reading\nengine: checking\n"


def test_terminal_output_leaves_nothing_behind() -> None:
    """The bar is gone when the process is ready; what stays on the screen is what the caller prints."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with show_steps(console, "engine") as show:
        show(Step("reading", 0.5))
    assert "engine: reading" in output.getvalue()
    assert output.getvalue().endswith("\x1b[2K")

"""`ringplan bench stream`: what plans from a planner process cost an engine."""

import json
import sys
from typing import Annotated

import typer

NOTES = (
    "calls: the engine's thread in planning calls, without waiting. blocked: it waits for a plan. "
    "ready: plans that were there when asked for. engine CPU, planner CPU: whole processes. loop CPU: the same loop "
    "without plans. stalls: the planner had no buffer set, and the engine nothing to run. "
    "full, cached: the same plan made in this process. unary: a plain gRPC call."
)
Rows = Annotated[list[int], typer.Option(help="Rows a plan label; may be repeated.", min=1)]
Labels = Annotated[list[int], typer.Option(help="Plan labels; may be repeated.", min=1, max=3)]
Repeats = Annotated[list[int], typer.Option(help="Steps a request asks for; may be repeated.", min=1)]
StepTimes = Annotated[list[float], typer.Option(help="Milliseconds a step takes; may be repeated.", min=0)]


def stream(  # noqa: PLR0913, PLR0917  # Each is an option of its own.
    rows: Rows = [32, 128, 512],  # noqa: B006  # typer copies it
    labels: Labels = [1, 3],  # noqa: B006  # as above
    repeat: Repeats = [1, 2, 8, 16],  # noqa: B006  # as above
    step_ms: StepTimes = [0, 2, 5, 10],  # noqa: B006  # as above
    pages: Annotated[int, typer.Option(help="Pages a row holds at the start.", min=1)] = 64,
    ring_depth: Annotated[int, typer.Option(help="Buffer sets; 0 takes twice as many as --repeat.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Steps timed in each case.", min=1)] = 400,
    spin: Annotated[bool, typer.Option(help="A step keeps its thread busy in Python instead of asleep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Times plans from a planner process as an engine gets them: what they cost its thread, and both processes."""
    from rich.console import Console
    from rich.progress import track

    from ringplan_cli.bench_stream import build_cases, measure_stream
    from ringplan_cli.machine import describe_machine
    from ringplan_cli.tables import Column, print_table

    cases = build_cases(rows, labels, repeat, step_ms, ring_depth)
    measured = track(
        measure_stream(cases, num_pages=pages, num_steps=steps, is_spinning=spin),
        "measuring",
        total=len(cases),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    figures = list(measured)
    machine = describe_machine()
    if as_json:
        typer.echo(json.dumps({"machine": machine, "cases": [row.as_json() for row in figures]}))
        return
    console = Console()
    names = (
        *("labels", "rows", "repeat", "depth", "step ms", "calls", "p50", "p99", "blocked", "p50", "p99", "ready"),
        *("engine CPU", "loop CPU", "planner CPU", "stalls", "plans/s", "full", "cached", "unary"),
    )
    title = f"Microseconds a step ({', '.join(machine.values())})"
    print_table(console, title, [Column(name) for name in names], [row.as_texts() for row in figures])
    console.print(NOTES)

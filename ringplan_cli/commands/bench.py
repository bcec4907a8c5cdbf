"""`ringplan bench`: measures Ringplan on this machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringplan_cli.commands.bench_engine import engine
from ringplan_cli.commands.bench_serve import EPILOG, serve
from ringplan_cli.commands.bench_stream import stream

PLAN_NOTES = (
    "full: from scratch. first: advanced, rows crossing pages at staggered steps, each for the first time. "
    "cached: the same later on. "
    "steady: cached, no row crosses a page. naive: row by row, as the tests' reference does it. "
    "memcpy: the bytes alone. speed-up: naive / cached."
)

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(stream)
app.command()(engine)
app.command(epilog=EPILOG)(serve)


@app.callback()
def bench() -> None:
    """Measures Ringplan on this machine: medians from one run, beside yardsticks from the same run."""


@app.command()
def plan(
    rows: Annotated[list[int], typer.Option(help="Rows a plan label; may be repeated.", min=1)] = [1, 8, 32, 128, 512],  # noqa: B006  # typer copies it
    pages: Annotated[list[int], typer.Option(help="Pages a row; may be repeated.", min=1)] = [10, 64],  # noqa: B006  # as above
    labels: Annotated[list[int], typer.Option(help="Plan labels; may be repeated.", min=1)] = [1, 2, 3],  # noqa: B006  # as above
    rounds: Annotated[int, typer.Option(help="Times that all are measured in turn, 48 steps each.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Times the planner's core, the writing of the buffer set included: full plans, cached ones, and yardsticks."""
    from rich.console import Console
    from rich.progress import track

    from ringplan_cli.bench_plan import build_cases, measure_in_turn, take_medians
    from ringplan_cli.machine import describe_machine
    from ringplan_cli.tables import Column, print_table

    cases = build_cases(rows, pages, labels)
    errors = Console(stderr=True)
    turns = list(
        track(
            measure_in_turn(cases, rounds),
            "measuring",
            total=rounds * len(cases),
            console=errors,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
    )
    figures = [take_medians(turns[i :: len(cases)]) for i in range(len(cases))]
    machine = describe_machine()
    if as_json:
        typer.echo(json.dumps({"machine": machine, "cases": [row.as_json() for row in figures]}))
        return
    console = Console()
    names = ("labels", "rows", "pages", "bytes", "full", "first", "cached", "steady", "naive", "memcpy", "speed-up")
    title = f"Microseconds a plan, medians ({', '.join(machine.values())})"
    print_table(console, title, [Column(name) for name in names], [row.as_texts() for row in figures])
    console.print(PLAN_NOTES)


@app.command()
def scale(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Times and weighs a planner process with many sessions, many streams, long contexts and a large pool."""
    from rich.console import Console

    from ringplan_cli.bench_scale import CASES, measure_scale
    from ringplan_cli.machine import describe_machine
    from ringplan_cli.tables import Column, print_table

    console = Console(stderr=True)
    figures = []
    with console.status("measuring") as status:
        for case, row in zip(CASES, measure_scale(), strict=True):
            status.update(f"measured: {case.name}")
            figures.append(row)
    machine = describe_machine()
    if as_json:
        typer.echo(json.dumps({"machine": machine, "cases": [row.as_json() for row in figures]}))
        return
    columns = [Column("case", is_figure=False), *map(Column, ("pages held", "private MB", "region MB", "us a plan"))]
    rows = [
        (
            row.name,
            f"{row.num_pages_held:,}",
            f"{row.private_bytes / 1e6:.1f}",
            f"{row.region_bytes / 1e6:.1f}",
            f"{row.plan_us:,.0f}",
        )
        for row in figures
    ]
    print_table(Console(), f"A planner process ({', '.join(machine.values())})", columns, rows)


@app.command()
def growth(
    plot: Annotated[Path | None, typer.Option(help="Draw a picture (PNG) here.", dir_okay=False)] = None,
    rounds: Annotated[int, typer.Option(help="Times that all sizes are measured in turn, 48 steps each.", min=1)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Shows how planning grows with rows, pages, labels and sessions, and what a stream, page and session weigh."""
    from rich.console import Console

    from ringplan_cli import bench_growth
    from ringplan_cli.growth_report import print_growth
    from ringplan_cli.machine import describe_machine
    from ringplan_cli.plot_style import import_matplotlib

    if plot is not None:
        import_matplotlib()  # what is missing is said before the measuring
    with Console(stderr=True).status("measuring plans") as status:
        plans = tuple(bench_growth.measure_plans(rounds))
        status.update("measuring sessions")
        sessions = tuple(bench_growth.measure_sessions())
        status.update("measuring memory")
        figures = bench_growth.GrowthFigures(plans, sessions, bench_growth.measure_memory(sessions))
    machine = describe_machine()
    if plot is not None:
        from ringplan_cli.growth_plot import write_growth_plot

        write_growth_plot(plot, ", ".join(machine.values()), figures)
    if as_json:
        typer.echo(json.dumps({"machine": machine, **figures.as_json()}))
        return
    print_growth(Console(), ", ".join(machine.values()), figures)
    if plot is not None:
        typer.echo(f"drawn: {plot}")

"""The figures of `ringplan bench growth` as tables."""

from rich.console import Console

from ringplan_cli.bench_growth import GrowthFigures
from ringplan_cli.tables import Column, print_table


def print_growth(console: Console, machine: str, figures: GrowthFigures) -> None:
    """Prints the tables.

    Args:
        console: where to.
        machine: what was measured on.
        figures: what was measured.
    """
    columns = [Column("what grows", is_figure=False), *map(Column, ("to", "full us", "cached us", "steady us"))]
    rows = [
        (cost.quantity, f"{cost.value:,}", f"{cost.full:,.1f}", f"{cost.cached:,.1f}", f"{cost.steady:,.1f}")
        for cost in figures.plans
    ]
    print_table(console, f"A plan in the core ({machine})", columns, rows)
    columns = [*map(Column, ("sessions", "us a plan", "private MB", "region MB"))]
    session_rows = [
        (f"{count}", f"{row.plan_us:,.0f}", f"{row.private_bytes / 1e6:.1f}", f"{row.region_bytes / 1e6:.1f}")
        for count, row in figures.sessions
    ]
    print_table(console, "A planner process, a round trip a plan", columns, session_rows)
    memory = figures.memory
    columns = [Column("one more", is_figure=False), Column("bytes of a planner's memory")]
    weights = [
        ("stream", f"{memory.stream:,.0f}"),
        ("page of a stream", f"{memory.page:,.1f}"),
        ("session of 32 streams", f"{memory.session:,.0f}"),
        ("its region, shared memory", f"{memory.session_region:,.0f}"),
    ]
    print_table(console, "What one thing more takes", columns, weights)

"""The figures of `ringplan bench growth` as a picture."""

from pathlib import Path

from ringplan_cli.bench_growth import GrowthFigures
from ringplan_cli.errors import CommandError
from ringplan_cli.plot_style import BLUE, DOTS_PER_INCH, GREEN, GREY, ORANGE, STYLE, import_matplotlib

_LINES = (("full", "from scratch", ORANGE), ("cached", "cached", BLUE), ("steady", "cached, no page crossed", GREEN))


def write_growth_plot(path: Path, machine: str, figures: GrowthFigures) -> None:
    """Draws a plan's cost against each quantity that grows, and a planner's memory against its sessions.

    Args:
        path: the picture, PNG.
        machine: what was measured on.
        figures: what was measured.

    Raises:
        CommandError: matplotlib is missing, or the picture cannot be written.
    """
    mpl = import_matplotlib()
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.4), layout="constrained")
        axes = list(figure.subplots(2, 3).flat)
        figure.suptitle(f"How planning grows ({machine})", x=0.01, ha="left", fontsize=12, fontweight="bold")
        fixed = {
            "rows": "64 pages a row, 1 label",
            "pages a row": "128 rows, 1 label",
            "plan labels": "128 rows x 64 pages",
        }
        for axis, (quantity, rest) in zip(axes, fixed.items(), strict=False):
            costs = [cost for cost in figures.plans if cost.quantity == quantity]
            for name, label, colour in _LINES:
                values = [getattr(cost, name) for cost in costs]
                axis.plot([cost.value for cost in costs], values, marker="o", markersize=4, color=colour, label=label)
            axis.set(title=f"A plan in the core: {rest}", xlabel=quantity, ylabel="microseconds")
        axes[0].legend(loc="upper left")
        for axis in axes[:2]:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:,.0f}")
        counts = [count for count, _ in figures.sessions]
        rows = [row for _, row in figures.sessions]
        axes[3].plot(counts, [row.plan_us for row in rows], marker="o", markersize=4, color=BLUE)
        axes[3].set(title="A plan's round trip, one at a time", xlabel="sessions", ylabel="microseconds")
        for values, label, colour in (
            ([row.private_bytes / 1e6 for row in rows], "private", BLUE),
            ([row.region_bytes / 1e6 for row in rows], "regions", GREY),
        ):
            axes[4].plot(counts, values, marker="o", markersize=4, color=colour, label=label)
        axes[4].set(title="A planner's memory above idle", xlabel="sessions of 32 streams", ylabel="MB")
        axes[4].legend(loc="upper left")
        memory = figures.memory
        weights = {"page": memory.page, "stream": memory.stream, "session": memory.session}
        bars = axes[5].barh(list(weights), list(weights.values()), color=BLUE)
        axes[5].bar_label(bars, [f" {weight:,.0f}" for weight in weights.values()])
        axes[5].set(title="One more of these takes", xlabel="bytes", xscale="log", xlim=(1, 2e6))
        for axis in axes[:5]:
            axis.set_ylim(bottom=0)
        try:
            figure.savefig(path, dpi=DOTS_PER_INCH)
        except OSError as error:
            raise CommandError(f"the picture cannot be written: {error}") from error

"""A load test as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringplan_cli.errors import CommandError
from ringplan_cli.load.options import LatencyTargets
from ringplan_cli.load.records import Outcome, RequestRecord
from ringplan_cli.load.report import count_in_flight
from ringplan_cli.plot_style import BLUE, DOTS_PER_INCH, GREEN, GREY, ORANGE, RED, STYLE, import_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BINS = 60
MILLISECONDS = 1e3


def write_plots(
    folder: Path, title: str, records: Sequence[RequestRecord], targets: LatencyTargets, seconds: float
) -> list[Path]:
    """Draws a load test.

    Args:
        folder: where the pictures go; it is made if it is not there.
        title: what was measured.
        records: of every request.
        targets: shown as lines.
        seconds: length of the run.

    Returns:
        The pictures: `latency.png` and `timeline.png`.

    Raises:
        CommandError: matplotlib is missing, or the folder cannot be written.
    """
    mpl = import_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            pictures = {
                "latency.png": _draw_latencies(title, records, targets),
                "timeline.png": _draw_timeline(title, records, targets, seconds),
            }
            for name, figure in pictures.items():
                figure.savefig(folder / name, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise CommandError(f"--plots: {folder}: {error.strerror or error}") from error
    return [folder / name for name in pictures]


def _draw_latencies(title: str, records: Sequence[RequestRecord], targets: LatencyTargets) -> "Figure":
    """Draws the share of requests (of tokens, for the inter-token latency) up to each latency."""
    figure, axes = _open_figure(title, 1, 3, (12.5, 4.2))
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    gaps = np.concatenate([np.empty(0), *(record.read_gaps() for record in records)]) * MILLISECONDS
    inter_token = targets.inter_token_target_seconds
    panels = (
        ("Time to first token", "seconds", "requests", _known(records, "ttft_seconds"), targets.ttft_target_seconds),
        ("Inter-token latency", "milliseconds", "tokens", gaps, inter_token and inter_token * MILLISECONDS),
        (
            "End to end",
            "seconds",
            "requests",
            _known(completed, "end_to_end_seconds"),
            targets.end_to_end_target_seconds,
        ),
    )
    for axis, (name, unit, what, values, target) in zip(axes, panels, strict=True):
        _draw_shares(axis, values, target)
        axis.set(title=name, xlabel=unit, ylabel=f"share of {what}, %")
    return figure


def _draw_shares(axis: "Axes", values: np.ndarray, target: float | None) -> None:
    axis.set_ylim(0, 102)
    if not values.size:
        axis.text(0.5, 0.5, "nothing to show", transform=axis.transAxes, ha="center", color=GREY)
        return
    values = np.sort(values)
    shares = np.arange(1, values.size + 1) / values.size * 100
    axis.step(np.concatenate([values[:1], values]), np.concatenate([[0.0], shares]), where="post", color=BLUE)
    for rank, colour in ((50, GREEN), (99, ORANGE)):
        value = float(np.percentile(values, rank))
        axis.axvline(value, color=colour, linestyle="--", linewidth=1.2, label=f"p{rank} {_write(value)}")
    if target is not None:
        axis.axvline(target, color=RED, linewidth=1.4, label=f"target {_write(target)}")
    axis.set_xlim(left=0)
    axis.legend(loc="lower right")


def _draw_timeline(title: str, records: Sequence[RequestRecord], targets: LatencyTargets, seconds: float) -> "Figure":
    """Draws the load and the answers over the run's time."""
    figure, (load, tokens, latency) = _open_figure(title, 3, 1, (9.5, 8.2), share_x=True)
    width = max(seconds, 1e-3) / NUM_BINS
    bins = np.arange(NUM_BINS + 1) * width

    in_flight = [(0.0, 0), *count_in_flight(records, seconds)]
    load.step([time for time, _ in in_flight], [num for _, num in in_flight], where="post", color=BLUE)
    load.set(title="Requests under way", ylabel="requests")
    load.set_ylim(bottom=0)

    times = [time for record in records for sample in record.samples.values() for time in sample.seconds]
    counts = [num for record in records for sample in record.samples.values() for num in sample.num_tokens]
    per_second = np.histogram(times, bins, weights=counts)[0] / width if times else np.zeros(NUM_BINS)
    tokens.stairs(per_second, bins, fill=True, color=GREEN)
    tokens.set(title="Tokens that came", ylabel="tokens/s")
    tokens.set_ylim(bottom=0)

    answered = [record for record in records if record.ttft_seconds is not None]
    latency.scatter(_arrivals(answered), _known(answered, "ttft_seconds"), s=14, color=BLUE, label="first token after")
    for outcome, colour, marker in ((Outcome.REFUSED, ORANGE, "v"), (Outcome.FAILED, RED, "x")):
        ended = [record for record in records if record.outcome is outcome]
        if ended:
            latency.scatter(
                _arrivals(ended), np.zeros(len(ended)), s=28, color=colour, marker=marker, label=outcome.value
            )
    if targets.ttft_target_seconds is not None:
        latency.axhline(targets.ttft_target_seconds, color=RED, linewidth=1.4, label="target")
    latency.set(title="Time to first token, by arrival", xlabel="seconds from the start", ylabel="seconds")
    latency.set_ylim(bottom=0)
    latency.set_xlim(0, bins[-1])
    latency.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=4)
    return figure


def _open_figure(
    title: str, num_rows: int, num_columns: int, size: tuple[float, float], *, share_x: bool = False
) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, sharex=share_x)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, list(axes.flat)


def _write(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _known(records: Sequence[RequestRecord], name: str) -> np.ndarray:
    values = (getattr(record, name) for record in records)
    return np.asarray([value for value in values if value is not None], np.float64)


def _arrivals(records: Sequence[RequestRecord]) -> np.ndarray:
    return np.asarray([record.request.arrival_seconds for record in records])

"""`ringplan bench engine`: how fast an engine is, beside what it could be held against."""

import json
from typing import Annotated

import typer

from engine_service.config import EngineSettings
from ringplan_cli.settings_flags import build_flags, read_given, with_parameters

ENGINE_FLAGS = (
    "model",
    "dtype",
    "num_threads",
    "pack_weights",
    "model_cache",
    "model_cache_dir",
    "page_size",
    "num_pages",
    "ring_depth",
    "cache_mode",
    "plan_ahead",
    "pad_decode_batches",
)
SHORT_SECONDS = 8.0


@with_parameters(
    build_flags(
        EngineSettings,
        panel="Engine",
        leave_out=[name for name in EngineSettings.model_fields if name not in ENGINE_FLAGS],
    )
)
def engine(  # noqa: PLR0913, PLR0917  # Each is an option of its own.
    context: typer.Context,
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.", min=1)] = [1, 8, 32],  # noqa: B006  # typer copies it
    rounds: Annotated[int, typer.Option(help="Requests for each, as a multiple of it.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Measure everything so often; figures are medians.", min=1)] = 3,
    continuous: Annotated[bool, typer.Option(help="Measure transformers' continuous batching too.")] = True,
    arrivals: Annotated[float, typer.Option(help="Seconds of requests at random moments; 0 for none.", min=0)] = 30.0,
    planners: Annotated[bool, typer.Option(help="Compare planners and cache modes.")] = True,
    short: Annotated[bool, typer.Option("--short", help="Fewer, shorter and once: about two minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Times a planner and an engine of its own against transformers and the bare model."""
    from rich.console import Console

    from ringplan_cli.bench_engine import OPTIONS, SHORT_OPTIONS, STEP_OPTIONS
    from ringplan_cli.bench_engine_report import BenchPlan, measure, print_report

    if short:
        rounds, repeats, continuous, arrivals = 1, 1, False, min(arrivals, SHORT_SECONDS)
    plan = BenchPlan(
        concurrency=tuple(concurrency),
        num_rounds=rounds,
        num_repeats=repeats,
        has_continuous=continuous,
        arrival_seconds=arrivals,
        has_planners=planners,
        options=SHORT_OPTIONS if short else OPTIONS,
        planner_options=STEP_OPTIONS if short else SHORT_OPTIONS,
    )
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    report = measure(read_given(context, EngineSettings), plan, notes)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    print_report(Console(), report)

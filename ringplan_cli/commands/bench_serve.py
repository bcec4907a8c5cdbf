"""`ringplan bench serve`: a load test of a running engine."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine_service.config import EngineSettings
from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.errors import BadSettingsError
from ringplan_cli.inference_client import InferenceClient
from ringplan_cli.load.load_test import LoadResult, LoadState, WriteRecord, open_requests_file, run_load_test
from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.options import LatencyTargets, LoadOptions
from ringplan_cli.load.report import LoadReport, build_report
from ringplan_cli.load.report_tables import print_report
from ringplan_cli.load.schedule import LoadRequest, build_schedule, fit_to_context
from ringplan_cli.load.trace import read_trace
from ringplan_cli.local_run import run_local_stack
from ringplan_cli.machine import describe_machine
from ringplan_cli.settings_flags import build_flags, build_settings, read_given, with_parameters

DEFAULT_TARGET = str(EngineSettings.model_fields["listen"].default)
# What a trace says itself.
TRACE_REPLACES = frozenset(LoadOptions.model_fields) - {"guidance_scale", "temperature", "ignore_eos"}
NO_ENGINE_FLAGS = frozenset(
    {"listen", "planner", "metrics_host", "metrics_port", "planner_connect_timeout_seconds", "log_level", "log_json"}
)
ENGINE_FLAGS_LEFT_OUT = NO_ENGINE_FLAGS | {"plan_timeout_seconds", "engine_name", "shutdown_grace_seconds"}
EPILOG = (
    "Exit status: 0 if the load ran to its end, whatever came of the requests; 128 + the signal's number if one cut "
    "it off, after what was measured has been printed."
)


@with_parameters(
    [
        *build_flags(LoadOptions, panel="Load"),
        *build_flags(LatencyTargets, panel="Latency targets: requests that keep all of them are goodput"),
        *build_flags(EngineSettings, panel="Engine (with --local)", leave_out=ENGINE_FLAGS_LEFT_OUT),
    ]
)
def serve(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The engine: 'host:port', 'unix:/path' or a path.")] = DEFAULT_TARGET,
    local: Annotated[bool, typer.Option("--local", help="Start a planner and an engine for this test.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Send the requests of this file, one JSON object a line.", show_default=False)
    ] = None,
    requests_file: Annotated[
        Path | None, typer.Option(help="Write what came of each request, one JSON object a line.", show_default=False)
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw PNGs into this folder (extra: bench).", show_default=False)
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Give up on a request after so long.", min=0.001)] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Sends an engine a load that does not wait for answers, and reports throughput, latencies and refusals."""
    given = read_given(context, LoadOptions)
    options = build_settings(LoadOptions, given)
    targets = build_settings(LatencyTargets, read_given(context, LatencyTargets))
    engine_given = read_given(context, EngineSettings)
    _check_flags(set(given), set(engine_given), has_trace=trace is not None, is_local=local)
    if plots is not None:
        # Better now than after the test.
        from ringplan_cli.plot_style import import_matplotlib

        import_matplotlib()
    requests = _build_requests(options) if trace is None else read_trace(trace)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with ExitStack() as resources:
        write_record = resources.enter_context(open_requests_file(requests_file))
        stack = resources.enter_context(run_local_stack(notes, engine_given)) if local else None
        target = target if stack is None else stack.target
        with InferenceClient(target) as client:
            info = client.fetch_model_info()
        if trace is None:
            requests, num_shortened = fit_to_context(requests, info.max_context_tokens)
            if num_shortened:
                notes.print(
                    f"{num_shortened:,} requests were shortened to the model's {info.max_context_tokens:,} tokens"
                )
        builder = MessageBuilder(info.vocab_size, info.eos_token_ids, options)
        result = _run(
            notes, target, requests, builder, timeout_seconds, write_record, stack.check_running if stack else None
        )
    was_stopped = result.signal_number is not None
    report = build_report(result.records, targets, result.seconds, was_stopped=was_stopped)
    title = f"{info.model}: {_describe_load(requests, options, trace)}"
    if as_json:
        document = _build_document(report, info, "local" if local else target, options, targets, trace)
        typer.echo(json.dumps(document, indent=2))
    else:
        print_report(Console(), title, report)
    if plots is not None:
        from ringplan_cli.load.plots import write_plots

        for path in write_plots(plots, title, result.records, targets, result.seconds):
            notes.print(f"[dim]wrote {path}[/]")
    if result.signal_number is not None:
        raise typer.Exit(128 + result.signal_number)


def _check_flags(given: set[str], engine_given: set[str], *, has_trace: bool, is_local: bool) -> None:
    """Refuses flags that could have no effect."""
    if engine_given and not is_local:
        raise BadSettingsError(f"--{min(engine_given).replace('_', '-')} needs --local")
    idle = given & TRACE_REPLACES if has_trace else set()
    if idle:
        raise BadSettingsError(
            f"--{min(idle).replace('_', '-')} has no effect with --trace, which says it for each request"
        )


def _build_requests(options: LoadOptions) -> list[LoadRequest]:
    try:
        return build_schedule(options)
    except ValueError as error:
        raise BadSettingsError(str(error)) from error


def _run(
    notes: Console,
    target: str,
    requests: list[LoadRequest],
    builder: MessageBuilder,
    timeout_seconds: float,
    write_record: WriteRecord,
    check_running: Callable[[], None] | None,
) -> LoadResult:
    with _show_state(notes, len(requests)) as show_state:

        def show(state: LoadState) -> None:
            if check_running is not None:
                check_running()
            show_state(state)

        return run_load_test(
            target, requests, builder, timeout_seconds=timeout_seconds, write_record=write_record, show=show
        )


@contextmanager
def _show_state(console: Console, num_requests: int) -> Iterator[Callable[[LoadState], None]]:
    """Yields what shows how far the test is: a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        yield lambda _state: None
        return
    text = TextColumn("[dim]{task.description}[/]")
    columns = (text, BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("connecting", total=num_requests)

        def show(state: LoadState) -> None:
            tokens_per_second = state.num_tokens / state.seconds if state.seconds else 0.0
            under_way = state.num_sent - state.num_ended
            description = f"{state.num_sent:,} sent, {under_way:,} under way, {tokens_per_second:,.0f} tokens/s"
            progress.update(task, completed=state.num_ended, description=description)

        yield show


def _describe_load(requests: list[LoadRequest], options: LoadOptions, trace: Path | None) -> str:
    if trace is not None:
        return f"{len(requests):,} requests of {trace.name}"
    arrivals = "all at once" if options.rate == float("inf") else f"{options.rate:g} requests/s"
    return f"{len(requests):,} requests, {arrivals}"


def _build_document(
    report: LoadReport,
    info: pb.GetModelInfoResponse,
    target: str,
    options: LoadOptions,
    targets: LatencyTargets,
    trace: Path | None,
) -> dict[str, Any]:
    kept = {
        name: str(value) if name.endswith("_tokens") or value == float("inf") else value
        for name, value in options
        if trace is None or name not in TRACE_REPLACES
    }
    return {
        "machine": describe_machine(),
        "model": info.model,
        "target": target,
        "server_version": info.server_version,
        "load": kept | {"trace": None if trace is None else str(trace)},
        "targets": targets.model_dump(),
        **report.as_json(),
    }

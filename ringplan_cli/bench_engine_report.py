"""`ringplan bench engine`: one run of all that it measures, and its tables."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from engine_service.config import EngineSettings, set_thread_defaults
from ringplan_cli.bench_engine import EngineBench, EngineFigures
from ringplan_cli.bench_engine_arrivals import ArrivalFigures, measure_arrivals
from ringplan_cli.bench_engine_planners import PlannerFigures, measure_planners
from ringplan_cli.bench_engine_yardsticks import YardstickProcess
from ringplan_cli.inference_client import InferenceClient
from ringplan_cli.load.options import LoadOptions
from ringplan_cli.local_run import run_local_stack
from ringplan_cli.machine import describe_machine
from ringplan_cli.settings_flags import build_settings
from ringplan_cli.tables import Column, print_table

COLUMNS = (
    *("at once", "requests", "tokens", "engine", "generate", "continuous", "forward"),
    *("ratio", "ratio cont.", "of limit", "first ms", "inter ms", "gRPC ms"),
)
NOTES = (
    "Tokens/s, medians. engine: over gRPC, planner and sampling included. generate: transformers' static batches, "
    "counting the tokens asked for. continuous: its continuous batching. forward: decode steps of the bare model with "
    "the engine's weights, in full batches of mean length, the limit. ratio: engine / generate; ratio cont.: engine / "
    "continuous; of limit: engine / forward. first, inter: the engine's time to first token and between tokens. "
    "gRPC: CPU a step of the threads that serve calls, beside the engine's own."
)
ARRIVAL_COLUMNS = (
    *("rate", "requests", "most at once"),
    *(f"{name} p{rank}" for name in ("first", "inter") for rank in (50, 90, 95, 99)),
)
PLANNER_COLUMNS = (
    *("planner", "cache", "at once", "tokens/s", "step"),
    *("forward", "scheduling", "planning", "sampling", "answers", "of forward"),
)
PLANNER_NOTES = (
    "The engine's loop without a server, its thread's time by part. process: plans from a planner process, ahead. "
    "in-process: the same planner called in the engine's thread, step by step. of forward: all but the forward, as a "
    "share of it."
)
# Share of what the engine can do that random arrivals ask of it.
ARRIVAL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure.

    Args:
        concurrency: requests at once, for each case.
        num_rounds: requests of a case, as a multiple of that.
        num_repeats: how often everything is measured.
        has_continuous: whether transformers' continuous batching is measured too.
        arrival_seconds: how long requests come at random moments; 0 leaves that out.
        has_planners: whether planners and cache modes are compared.
        options: the requests.
        planner_options: the requests that planners are compared with.
    """

    concurrency: tuple[int, ...]
    num_rounds: int
    num_repeats: int
    has_continuous: bool
    arrival_seconds: float
    has_planners: bool
    options: LoadOptions
    planner_options: LoadOptions


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured.

    Args:
        machine: on what.
        model: the model.
        cases: by concurrency.
        arrivals: under random arrivals, if that was measured.
        planners: by planner and cache mode, if that was.
    """

    machine: dict[str, str]
    model: str
    cases: list[EngineFigures]
    arrivals: ArrivalFigures | None
    planners: list[PlannerFigures]

    def as_json(self) -> dict[str, Any]:
        """Returns everything by name."""
        return {
            "machine": self.machine,
            "model": self.model,
            "cases": [row.as_json() for row in self.cases],
            "arrivals": self.arrivals and self.arrivals.as_json(),
            "planners": [row.as_json() for row in self.planners],
        }


def measure(given: Mapping[str, Any], plan: BenchPlan, notes: Console) -> BenchReport:
    """Measures everything.

    Args:
        given: the engine's settings that are not the default, as flags give them.
        plan: what to measure.
        notes: where to show what is going on.

    Raises:
        CommandError: a process ended, or a request was not completed.
    """
    set_thread_defaults()
    settings = build_settings(EngineSettings, given)
    most = str(max(*plan.concurrency, settings.max_running_requests))
    arrivals = None
    with (
        tempfile.TemporaryDirectory(prefix="ringplan-") as folder,
        # What it is compared with runs on the CPU.
        run_local_stack(notes, {**given, "device": "cpu", "max_running_requests": most}) as stack,
    ):
        with InferenceClient(stack.target) as client:
            info = client.fetch_model_info()
        with (
            notes.status("loading the model for the yardsticks") as status,
            YardstickProcess(settings, Path(folder) / "yardsticks.log") as yardsticks,
        ):
            bench = EngineBench(stack, info, yardsticks, plan.options)
            bench.warm_up(has_continuous=plan.has_continuous)
            cases = []
            for number in plan.concurrency:
                status.update(f"measuring {number} at once")
                cases.append(
                    bench.measure(number, plan.num_rounds, plan.num_repeats, has_continuous=plan.has_continuous)
                )
            facts = yardsticks.facts
            if plan.arrival_seconds:
                status.update("measuring random arrivals")
                best = max(cases, key=lambda case: case.engine)
                rate = ARRIVAL_SHARE * best.engine / (best.num_tokens / best.num_requests)
                update = {"rate": round(rate, 3), "duration_seconds": plan.arrival_seconds}
                arrivals = measure_arrivals(stack.target, info, plan.options.model_copy(update=update))
    planners = []
    if plan.has_planners:
        with notes.status("comparing planners"):
            planners = list(measure_planners(settings, plan.planner_options, max(plan.concurrency), plan.num_repeats))
    machine = describe_machine() | {"torch": f"torch {facts['torch']}", "threads": f"{facts['threads']} threads"}
    return BenchReport(machine, info.model, cases, arrivals, planners)


def print_report(console: Console, report: BenchReport) -> None:
    """Prints tables and what their columns mean.

    Args:
        console: where to.
        report: what was measured.
    """
    title = f"{report.model} ({', '.join(report.machine.values())})"
    print_table(console, title, [Column(name) for name in COLUMNS], [row.as_texts() for row in report.cases])
    console.print(NOTES)
    if report.arrivals is not None:
        columns = [Column(name) for name in ARRIVAL_COLUMNS]
        print_table(console, "Random (Poisson) arrivals, milliseconds", columns, [report.arrivals.as_texts()])
    if report.planners:
        columns = [Column(name, is_figure=place > 1) for place, name in enumerate(PLANNER_COLUMNS)]
        print_table(console, "Milliseconds a step", columns, [row.as_texts() for row in report.planners])
        console.print(PLANNER_NOTES)

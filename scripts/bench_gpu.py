"""Measures decode steps on a GPU: an engine's loop with one planner and another, over a model with random weights.

Usage: `make bench-gpu`, or `python scripts/bench_gpu.py --json build/bench-gpu.json`. The model has the shape of
Qwen3-0.6B in bfloat16. Each case runs the same prompts and as many tokens after each; what is told is of the steps
after the last prompt: tokens a second, and where the time of the engine's thread goes. `--device cpu --short` shows
that it runs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_service.attention_choice import choose_attention_backend
from engine_service.cuda_graphs import CudaCapturer
from engine_service.device_setup import build_plan_copies, capture_decode_steps, choose_device
from engine_service.model_runner import ModelRunner
from engine_service.offline import FORWARD, PLANNING, SAMPLING, OfflineRun, run_offline
from engine_service.plan_copies import PlanCopies
from engine_service.plan_pipeline import choose_ring_depth
from engine_service.planner_link import PlannerLink, StepPlanner
from engine_service.warm_up import warm_up
from engine_service.yardsticks import Task
from planner_service.client import CacheMode, Plan
from ringplan_cli.bench_engine_in_process import InProcessPlanner
from ringplan_cli.local_planner import LocalPlanner
from scripts.random_model import QWEN3_0_6B, TINY, ModelShape, build_model

PAGE_SIZE = 16
PLAN_AHEAD = 8
MAX_STEP_TOKENS = 8_192
CONNECT_SECONDS = 10.0
COPY_TIMEOUT_SECONDS = 30.0
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Args:
        concurrencies: requests at once, one after the other.
        prompt_tokens: the shortest prompt and the longest.
        num_new_tokens: tokens after each prompt.
        num_repeats: how often each case is measured, after a short run that is not.
        limit_seconds: no case begins later than so long after the start.
        shape: the model's.
    """

    concurrencies: tuple[int, ...] = (8, 32, 128)
    prompt_tokens: tuple[int, int] = (128, 384)
    num_new_tokens: int = 64
    num_repeats: int = 2
    limit_seconds: float = 190.0
    shape: ModelShape = QWEN3_0_6B


FULL = Extent()
SHORT = Extent((2, 4), (4, 12), 6, 1, 60.0, TINY)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the same requests.

    Args:
        where: "process" for the planner's own process, planning ahead; "thread" for the engine's, step by step.
        cache_mode: how plans are cached.
        pins: whether the ring's memory is registered with CUDA.
        uses_graphs: whether decode steps are replayed as CUDA graphs.
    """

    where: str
    cache_mode: CacheMode
    pins: bool = True
    uses_graphs: bool = True


# The ones that matter most come first: the time may end before the list does.
CASES = (
    Case("process", CacheMode.ON),
    Case("thread", CacheMode.OFF),
    Case("process", CacheMode.OFF),
    Case("process", CacheMode.VERIFY),
    Case("process", CacheMode.ON, pins=False),
    Case("process", CacheMode.ON, uses_graphs=False),
    Case("thread", CacheMode.ON),
)


class FencedInProcessPlanner(InProcessPlanner):
    """A planner in the engine's thread whose sets are written again only once they have been copied."""

    copies: PlanCopies | None = None

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that a step has run; waits for the copy of its plan."""
        if self.copies is not None:
            self.copies.fence.end(plan.step_id)
            self.copies.fence.wait(plan.step_id)
            self.copies.fence.take_free()
        super().end_step(plan, is_kept=is_kept)

    def close(self) -> None:
        """Gives the memory up."""
        if self.copies is not None:
            self.copies.end_session()
        super().close()


def draw_tasks(concurrency: int, extent: Extent) -> list[Task]:
    """Returns random prompts."""
    generator = torch.Generator().manual_seed(concurrency)
    shortest, longest = extent.prompt_tokens
    lengths = torch.randint(shortest, longest + 1, (concurrency,), generator=generator).tolist()
    return [
        Task(
            tuple(torch.randint(0, extent.shape.vocab_size, (length,), generator=generator).tolist()),
            extent.num_new_tokens,
        )
        for length in lengths
    ]


@contextmanager
def open_planner(
    case: Case, target: str, runner: ModelRunner, concurrency: int, on_pinned_changed: Callable[[bool], None]
) -> Iterator[StepPlanner]:
    """Connects a case's planner, and copies plans as the case has it, as far as CUDA lets it."""
    device = runner.loaded.device
    runner.copies = copies = build_plan_copies(
        device, pins=case.pins, timeout_seconds=COPY_TIMEOUT_SECONDS, on_pinned_changed=on_pinned_changed
    )
    options: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": runner.num_pages, "cache_mode": case.cache_mode}
    planner: PlannerLink | FencedInProcessPlanner
    if case.where == "process":
        planner = PlannerLink(
            target,
            max_running_requests=concurrency,
            ring_depth=choose_ring_depth(PLAN_AHEAD),
            plan_ahead=PLAN_AHEAD,
            copies=copies,
            **options,
        )
        planner.connect(CONNECT_SECONDS)
    else:
        planner = FencedInProcessPlanner(max_streams=concurrency, **options)
        planner.copies = copies
    try:
        yield planner
    finally:
        planner.close()


def measure(
    case: Case, target: str, runner: ModelRunner, concurrency: int, extent: Extent
) -> dict[str, str | int | float | bool | None]:
    """Returns a case's figures: medians over its repeats, in seconds where they are times."""
    tasks = draw_tasks(concurrency, extent)
    graphs = runner.graphs
    if not case.uses_graphs:
        runner.graphs = None
    runs: list[OfflineRun] = []
    told: list[bool] = []
    try:
        with open_planner(case, target, runner, concurrency, told.append) as planner:
            for number in range(1 + extent.num_repeats):
                some = tasks if number else [Task(task.prompt_token_ids, 4) for task in tasks]
                runs.append(run_offline(runner, planner, some, concurrency, max_step_tokens=MAX_STEP_TOKENS))
    finally:
        runner.graphs = graphs
    decodes = [run.decode for run in runs[1:]]
    return {
        "planner": case.where,
        "cache_mode": case.cache_mode.name.lower(),
        "is_pinned": None if runner.copies is None else any(told),
        "uses_graphs": case.uses_graphs and graphs is not None,
        "concurrency": concurrency,
        "decode_tokens_per_second": statistics.median(one.num_tokens / one.seconds for one in decodes),
        "step_seconds": statistics.median(one.seconds / one.num_steps for one in decodes),
        "planning_seconds": statistics.median(one.part_seconds[PLANNING] / one.num_steps for one in decodes),
        # The GPU is given the forward in the one, and waited for in the other.
        "model_seconds": statistics.median(
            (one.part_seconds[FORWARD] + one.part_seconds[SAMPLING]) / one.num_steps for one in decodes
        ),
    }


def open_runner(device: torch.device, extent: Extent) -> ModelRunner:
    """Returns the model, warmed up, with its decode steps captured where they can be."""
    loaded = build_model(device, extent.shape)
    longest = extent.prompt_tokens[1] + extent.num_new_tokens
    num_pages = 1 + max(extent.concurrencies) * (-(-longest // PAGE_SIZE) + 1)
    backend = choose_attention_backend("auto", loaded, page_size=PAGE_SIZE, workspace_bytes=WORKSPACE_BYTES)
    copies = build_plan_copies(
        device, pins=False, timeout_seconds=COPY_TIMEOUT_SECONDS, on_pinned_changed=lambda _is_pinned: None
    )
    runner = ModelRunner(loaded, num_pages=num_pages, page_size=PAGE_SIZE, backend=backend, copies=copies)
    warm_up(runner, MAX_STEP_TOKENS)
    if copies is not None:
        capture_decode_steps(
            runner,
            CudaCapturer(device),
            max_running_requests=max(extent.concurrencies),
            on_decode=lambda _was_replayed: None,
        )
    return runner


def build_table(figures: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the figures for people."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("planner", "cache", "ring", "graphs", "requests", "tokens/s", "step ms", "planning us", "model ms"):
        table.add_column(name, justify="left" if name in {"planner", "cache", "ring", "graphs"} else "right")
    for one in figures:
        table.add_row(
            one["planner"],
            one["cache_mode"],
            {None: "-", True: "pinned", False: "pageable"}[one["is_pinned"]],
            "on" if one["uses_graphs"] else "off",
            f"{one['concurrency']:,}",
            f"{one['decode_tokens_per_second']:,.0f}",
            f"{one['step_seconds'] * 1e3:,.2f}",
            f"{one['planning_seconds'] * 1e6:,.0f}",
            f"{one['model_seconds'] * 1e3:,.2f}",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measures decode steps on a GPU.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cuda")
    parser.add_argument("--short", action="store_true", help="a tiny model and few tokens: shows that it runs")
    parser.add_argument("--json", type=Path, help="where to write the figures too")
    options = parser.parse_args(arguments)
    started, extent = time.monotonic(), SHORT if options.short else FULL
    device = choose_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    figures: list[dict[str, Any]] = []
    left_out: list[str] = []
    with LocalPlanner() as local, torch.inference_mode():
        runner = open_runner(device, extent)
        setup_seconds = time.monotonic() - started
        for case in CASES:
            for concurrency in extent.concurrencies:
                if time.monotonic() - started > extent.limit_seconds:
                    left_out.append(f"{case} at {concurrency}")
                else:
                    figures.append(measure(case, local.target, runner, concurrency, extent))
    backend = type(runner.backend).__name__
    title = f"Decode steps on {name}, {backend}, torch {torch.__version__}; made ready in {setup_seconds:.0f} s"
    Console(width=120).print(build_table(figures, title))
    document = {"device": name, "torch": torch.__version__, "backend": backend, "cases": figures, "left_out": left_out}
    text = json.dumps(document, indent=2)
    if options.json is None:
        sys.stdout.write(text + "\n")
    else:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

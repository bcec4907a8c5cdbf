"""`ringplan bench engine`: where the time of the engine's thread goes, with one planner and another."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from engine_service.config import EngineSettings
from engine_service.plan_pipeline import choose_ring_depth
from engine_service.planner_link import PlannerLink, StepPlanner
from planner_service.client import CacheMode
from ringplan_cli.bench_engine_in_process import InProcessPlanner
from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.options import LoadOptions
from ringplan_cli.load.schedule import build_schedule
from ringplan_cli.local_planner import LocalPlanner

PARTS = ("scheduling", "planning", "sampling", "answers")
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PlannerFigures:
    """What a step took with one planner, in seconds: medians over the repeats.

    Args:
        where: "process" or "in-process".
        cache: its cache mode.
        num_rows: requests at once.
        tokens_per_second: of the engine's loop alone, without a server.
        step: a whole step.
        forward: the model's part of it.
        parts: each of `PARTS`.
    """

    where: str
    cache: str
    num_rows: int
    tokens_per_second: float
    step: float
    forward: float
    parts: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            "planner": self.where,
            "cache_mode": self.cache,
            "concurrency": self.num_rows,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step,
            "forward_seconds": self.forward,
            **{f"{part}_seconds": seconds for part, seconds in self.parts.items()},
        }

    def as_texts(self) -> tuple[str, ...]:
        """Returns the figures as a row for people."""
        return (
            self.where,
            self.cache,
            f"{self.num_rows:,}",
            f"{self.tokens_per_second:,.1f}",
            *(f"{seconds * 1e3:,.2f}" for seconds in (self.step, self.forward, *self.parts.values())),
            f"{sum(self.parts.values()) / self.forward:.1%}",
        )


def measure_planners(
    settings: EngineSettings,
    options: LoadOptions,
    num_rows: int,
    num_repeats: int,
    modes: Sequence[CacheMode] = tuple(CacheMode),
) -> Iterator[PlannerFigures]:
    """Yields the figures of each planner; they take turns, and run the same requests.

    Args:
        settings: what the engine is to be.
        options: the requests.
        num_rows: requests at once, and in all.
        num_repeats: how often each runs.
        modes: the cache modes.
    """
    # torch is loaded here.
    from engine_service.offline import FORWARD, OfflineRun, open_runner, run_offline
    from engine_service.yardsticks import Task

    requests = build_schedule(options.model_copy(update={"requests": num_rows, "rate": float("inf")}))
    longest = max((request.prompt_tokens or 0) + request.max_tokens for request in requests)
    num_pages = 1 + num_rows * (-(-longest // settings.page_size) + 1)
    runner = open_runner(settings, num_pages)
    builder = MessageBuilder(runner.loaded.vocab_size, runner.loaded.eos_token_ids, options)
    tasks = [Task(tuple(builder.build(request, 0).token_ids.ids), request.max_tokens) for request in requests]
    num_tokens = sum(task.num_new_tokens for task in tasks)
    with ExitStack() as resources:
        local = resources.enter_context(LocalPlanner())
        planners: dict[tuple[str, str], StepPlanner] = {}
        for mode in modes:
            link = PlannerLink(
                local.target,
                page_size=settings.page_size,
                num_pages=num_pages,
                max_running_requests=num_rows,
                ring_depth=settings.ring_depth or choose_ring_depth(settings.plan_ahead),
                cache_mode=mode,
                plan_ahead=settings.plan_ahead,
            )
            link.connect(_CONNECT_SECONDS)
            inner = InProcessPlanner(
                page_size=settings.page_size, num_pages=num_pages, max_streams=num_rows, cache_mode=mode
            )
            planners |= {("process", mode.name.lower()): link, ("in-process", mode.name.lower()): inner}
        for planner in planners.values():
            resources.callback(planner.close)
            run_offline(runner, planner, [Task(task.prompt_token_ids, 4) for task in tasks], num_rows)
        runs: dict[tuple[str, str], list[OfflineRun]] = {key: [] for key in planners}
        for _ in range(num_repeats):
            for key, planner in planners.items():
                runs[key].append(run_offline(runner, planner, tasks, num_rows))
    for (where, cache), some in runs.items():

        def find_part(part: str, some: list[OfflineRun] = some) -> float:
            return statistics.median(run.part_seconds[part] / run.num_steps for run in some)

        yield PlannerFigures(
            where=where,
            cache=cache,
            num_rows=num_rows,
            tokens_per_second=statistics.median(num_tokens / run.seconds for run in some),
            step=statistics.median(run.seconds / run.num_steps for run in some),
            forward=find_part(FORWARD),
            parts={part: find_part(part) for part in PARTS},
        )

"""An engine without a server: its loop in the caller's own thread, timed part by part."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from engine_service.answer import AnswerBuilder
from engine_service.config import EngineSettings
from engine_service.detokenizer import IncrementalDetokenizer
from engine_service.executor import ModelExecutor
from engine_service.generation_spec import GenerationSpec, StoppingParams
from engine_service.ledger import RequestLedger
from engine_service.loop import EngineLoop
from engine_service.metrics import EngineMetrics
from engine_service.model_cache import ModelCache
from engine_service.model_loading import load_model
from engine_service.model_runner import ModelRunner
from engine_service.planner_link import StepPlanner
from engine_service.request import GeneratedDelta, GenerationEvent, Request
from engine_service.scheduler import Scheduler
from engine_service.step_layout import LayoutOptions
from engine_service.validation import EngineLimits
from engine_service.yardsticks import Answers, Task

# The parts of the loop's work that are timed; what is left of it is scheduling.
PLANNING, FORWARD, SAMPLING, ANSWERS = "planning", "forward", "sampling", "answers"
SCHEDULING = "scheduling"
MAX_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """What tasks took.

    Args:
        answers: the tokens of each.
        seconds: all of it.
        num_steps: steps run.
        part_seconds: the same seconds by part.
        decode: what came once every task had its first token.
    """

    answers: Answers
    seconds: float
    num_steps: int
    part_seconds: dict[str, float]
    decode: "DecodePhase"


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """Decode steps alone.

    Args:
        num_tokens: tokens chosen in them.
        num_steps: how many.
        seconds: what they took.
        part_seconds: the same seconds by part.
    """

    num_tokens: int
    num_steps: int
    seconds: float
    part_seconds: dict[str, float]


class PartTimes:
    """Seconds that parts took by themselves, what they called of other parts left out.

    Attributes:
        seconds: by part.
        num_calls: by part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_calls: dict[str, int] = {}
        self._seconds_of_inner: list[float] = []

    @contextmanager
    def watching(self, owner: Any, part: str, *methods: str) -> Iterator[None]:
        """Counts the calls of an object's methods towards a part.

        Args:
            owner: the object.
            part: the part.
            methods: names of the methods.
        """
        for method in methods:
            setattr(owner, method, partial(self._time, getattr(owner, method), part))
        try:
            yield
        finally:
            for method in methods:
                delattr(owner, method)

    def _time(self, call: Callable[..., Any], part: str, *args: Any, **kwargs: Any) -> Any:
        self._seconds_of_inner.append(0.0)
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - started
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds - self._seconds_of_inner.pop()
            self.num_calls[part] = self.num_calls.get(part, 0) + 1
            if self._seconds_of_inner:
                self._seconds_of_inner[-1] += seconds


def run_offline(
    runner: ModelRunner,
    planner: StepPlanner,
    tasks: Sequence[Task],
    max_running_requests: int,
    layout_options: LayoutOptions = LayoutOptions(),  # noqa: B008  # It is frozen.
    max_step_tokens: int = MAX_STEP_TOKENS,
) -> OfflineRun:
    """Runs tasks through the engine's loop to their end, all of them there from the start.

    Args:
        runner: the model.
        planner: connected, and used for nothing else meanwhile.
        tasks: what to run.
        max_running_requests: how many run at once, at most.
        layout_options: how steps are laid out.
        max_step_tokens: tokens of a step at most, or one for each request if that is more.

    Returns:
        What it took.
    """
    loaded = runner.loaded
    limits = EngineLimits(loaded.vocab_size, loaded.max_context_tokens, runner.page_size, runner.num_pages)
    metrics = EngineMetrics(CollectorRegistry())

    def open_answer(request: Request) -> AnswerBuilder:
        detokenizer = IncrementalDetokenizer(loaded.tokenizer, request.spec.prompt_token_ids)
        return AnswerBuilder(request, detokenizer, loaded.eos_token_ids)

    ledger = RequestLedger(time.monotonic, metrics, open_answer)
    scheduler = Scheduler(limits, max_running_requests, max(max_step_tokens, max_running_requests))
    executor = ModelExecutor(runner, loaded.vocab_size, loaded.eos_token_ids)
    loop = EngineLoop(scheduler, planner, executor, ledger, metrics, layout_options=layout_options)
    answers: Answers = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        spec = GenerationSpec(
            request_id=str(number),
            prompt_token_ids=task.prompt_token_ids,
            stopping=StoppingParams(max_tokens=task.num_new_tokens, ignore_eos=True),
        )
        loop.add(Request(spec, number + 1, task.num_new_tokens), partial(_note, answers[number]), time.monotonic())
    times = PartTimes()
    with (
        times.watching(planner, PLANNING, "plan_step", "end_step", "drop"),
        times.watching(executor, SAMPLING, "run"),
        times.watching(runner, FORWARD, "forward"),
        times.watching(ledger, ANSWERS, "append", "close", "deliver"),
    ):
        started = time.perf_counter()
        while len(ledger) and not all(answers):
            loop.tick()
            ledger.deliver()
        decode_started, before, num_prompt_steps = time.perf_counter(), dict(times.seconds), times.num_calls[FORWARD]
        num_first_tokens = sum(map(len, answers))
        while len(ledger):
            loop.tick()
            ledger.deliver()
        ended = time.perf_counter()
    planner.flush()
    num_steps, seconds = times.num_calls[FORWARD], ended - decode_started
    decode = DecodePhase(
        num_tokens=sum(map(len, answers)) - num_first_tokens,
        num_steps=num_steps - num_prompt_steps,
        seconds=seconds,
        part_seconds=_add_scheduling(
            {part: value - before.get(part, 0.0) for part, value in times.seconds.items()}, seconds
        ),
    )
    return OfflineRun(answers, ended - started, num_steps, _add_scheduling(times.seconds, ended - started), decode)


def _add_scheduling(part_seconds: dict[str, float], seconds: float) -> dict[str, float]:
    """Returns the seconds by part with those that are no other part's."""
    return {SCHEDULING: seconds - sum(part_seconds.values()), **part_seconds}


def _note(answer: list[int], event: GenerationEvent) -> None:
    if isinstance(event, GeneratedDelta):
        answer += [token.token_id for token in event.tokens]


def open_runner(settings: EngineSettings, num_pages: int) -> ModelRunner:
    """Loads an engine's model as the engine would.

    Args:
        settings: the engine's.
        num_pages: pages of the KV cache, the sink page included.

    Raises:
        ModelError: it cannot be loaded.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    cache = ModelCache(settings.model_cache_dir.expanduser()) if settings.model_cache else None
    loaded = load_model(settings.model, dtype=settings.dtype, cache=cache)
    if settings.pack_weights:
        loaded.pack_weights()
    return ModelRunner(loaded, num_pages=num_pages, page_size=settings.page_size)

"""`ringplan bench engine`: tokens a second of a real engine, beside transformers and the bare model in the same run."""

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.bench_engine_yardsticks import YardstickProcess
from ringplan_cli.errors import CommandError
from ringplan_cli.load.calls import InferenceCaller
from ringplan_cli.load.lengths import UniformLengths
from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.options import LatencyTargets, LoadOptions
from ringplan_cli.load.records import Outcome, RequestRecord, build_records
from ringplan_cli.load.report import build_report
from ringplan_cli.load.schedule import LoadRequest, build_schedule
from ringplan_cli.local_stack import LocalStack
from ringplan_cli.run_report import fetch_metrics
from ringplan_cli.thread_cpu import read_server_seconds

PROMPT_TOKENS = UniformLengths(16, 64)
ANSWER_TOKENS = UniformLengths(16, 128)
NUM_FORWARDS = 20
TIMEOUT_SECONDS = 1_200.0
OPTIONS = LoadOptions(prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS)
SHORT_OPTIONS = LoadOptions(prompt_tokens=PROMPT_TOKENS, answer_tokens=UniformLengths(16, 64))
# Where a step is measured, and not an answer.
STEP_OPTIONS = LoadOptions(prompt_tokens=PROMPT_TOKENS, answer_tokens=UniformLengths(12, 24))


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Tokens a second at one concurrency: medians over the repeats, ratios too.

    Args:
        concurrency: requests under way at once; rows of the yardsticks' batches.
        num_requests: requests sent.
        num_tokens: tokens of their answers.
        engine: the engine, over gRPC, with its planner.
        generate: transformers' `generate` in static batches, counting only tokens that were asked for.
        continuous: transformers' continuous batching; None if it was left out.
        forward: decode steps of the bare model, in full batches of mean length.
        engine_over_generate: of one repeat each.
        engine_over_continuous: likewise.
        engine_over_forward: likewise.
        ttft_seconds: the engine's time to first token, median.
        inter_token_seconds: the engine's time between tokens, median.
        server_seconds: CPU a step of the engine's threads that serve gRPC; they run beside the engine's own.
    """

    concurrency: int
    num_requests: int
    num_tokens: int
    engine: float
    generate: float
    continuous: float | None
    forward: float
    engine_over_generate: float
    engine_over_continuous: float | None
    engine_over_forward: float
    ttft_seconds: float
    inter_token_seconds: float
    server_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            "concurrency": self.concurrency,
            "requests": self.num_requests,
            "answer_tokens": self.num_tokens,
            "engine_tokens_per_second": self.engine,
            "generate_tokens_per_second": self.generate,
            "continuous_tokens_per_second": self.continuous,
            "forward_tokens_per_second": self.forward,
            "engine_over_generate": self.engine_over_generate,
            "engine_over_continuous": self.engine_over_continuous,
            "engine_over_forward": self.engine_over_forward,
            "ttft_p50_seconds": self.ttft_seconds,
            "inter_token_p50_seconds": self.inter_token_seconds,
            "server_cpu_seconds_a_step": self.server_seconds,
        }

    def as_texts(self) -> tuple[str, ...]:
        """Returns the figures as a row for people."""
        return (
            *(f"{count:,}" for count in (self.concurrency, self.num_requests, self.num_tokens)),
            *(f"{speed:,.1f}" for speed in (self.engine, self.generate)),
            "-" if self.continuous is None else f"{self.continuous:,.1f}",
            f"{self.forward:,.1f}",
            f"{self.engine_over_generate:.2f}x",
            "-" if self.engine_over_continuous is None else f"{self.engine_over_continuous:.2f}x",
            f"{self.engine_over_forward:.0%}",
            f"{self.ttft_seconds * 1e3:,.0f}",
            f"{self.inter_token_seconds * 1e3:,.1f}",
            f"{self.server_seconds * 1e3:,.2f}",
        )


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Seconds that the same requests took, one after the other; of a step of the bare model, and what came with it."""

    engine: float
    generate: float
    continuous: float | None
    forward_step: float
    ttft: float
    inter_token: float
    server_step: float


class EngineBench:
    """A running engine and the yardsticks beside it.

    Args:
        stack: the engine and its planner.
        info: what it has loaded.
        yardsticks: the other process.
        options: the requests.
    """

    def __init__(
        self,
        stack: LocalStack,
        info: pb.GetModelInfoResponse,
        yardsticks: YardstickProcess,
        options: LoadOptions = OPTIONS,
    ) -> None:
        self._stack, self._yardsticks, self._options = stack, yardsticks, options
        self._builder = MessageBuilder(info.vocab_size, info.eos_token_ids, options)

    def warm_up(self, *, has_continuous: bool) -> None:
        """Runs everything once, so that nothing is measured for the first time.

        Args:
            has_continuous: whether transformers' continuous batching is measured too.
        """
        requests = [LoadRequest(0.0, 1, 4, prompt_tokens=8)] * 2
        self._send(requests, 2)
        self._time_generate(requests, 2)
        if has_continuous:
            self._time_generate(requests, 2, is_continuous=True)
        self._yardsticks.time_forward(2, 8, 4)

    def measure(self, concurrency: int, num_rounds: int, num_repeats: int, *, has_continuous: bool) -> EngineFigures:
        """Measures one concurrency: yardsticks and engine by turns, each with the machine to itself.

        Args:
            concurrency: requests under way at once.
            num_rounds: requests are so many times that.
            num_repeats: how often everything is measured; figures are medians.
            has_continuous: whether transformers' continuous batching is measured too.

        Raises:
            CommandError: a request was not completed.
        """
        num_requests = concurrency * num_rounds
        requests = build_schedule(self._options.model_copy(update={"requests": num_requests, "rate": float("inf")}))
        num_tokens = sum(request.max_tokens for request in requests)
        runs = [self._measure_once(requests, concurrency, has_continuous=has_continuous) for _ in range(num_repeats)]

        def find_median(values: Iterable[float]) -> float:
            return statistics.median(values)

        return EngineFigures(
            concurrency=concurrency,
            num_requests=num_requests,
            num_tokens=num_tokens,
            engine=find_median(num_tokens / run.engine for run in runs),
            generate=find_median(num_tokens / run.generate for run in runs),
            continuous=_find_median_if_any([run.continuous and num_tokens / run.continuous for run in runs]),
            forward=find_median(concurrency / run.forward_step for run in runs),
            engine_over_generate=find_median(run.generate / run.engine for run in runs),
            engine_over_continuous=_find_median_if_any(
                [run.continuous and run.continuous / run.engine for run in runs]
            ),
            engine_over_forward=find_median(num_tokens / run.engine / (concurrency / run.forward_step) for run in runs),
            ttft_seconds=find_median(run.ttft for run in runs),
            inter_token_seconds=find_median(run.inter_token for run in runs),
            server_seconds=find_median(run.server_step for run in runs),
        )

    def _measure_once(self, requests: Sequence[LoadRequest], concurrency: int, *, has_continuous: bool) -> _Repeat:
        mean_prompt = sum(request.prompt_tokens or 0 for request in requests) // len(requests)
        mean_answer = sum(request.max_tokens for request in requests) // len(requests)
        before = self._read_server()
        records = self._send(requests, concurrency)
        server_seconds, num_steps = (now - then for now, then in zip(self._read_server(), before, strict=True))
        seconds = max(record.ended_seconds or 0.0 for record in records)
        latencies = build_report(records, LatencyTargets(), seconds).latencies
        ttft, inter_token = latencies["ttft"], latencies["inter_token"]
        assert ttft is not None
        assert inter_token is not None
        return _Repeat(
            engine=seconds,
            generate=self._time_generate(requests, concurrency),
            continuous=self._time_generate(requests, concurrency, is_continuous=True) if has_continuous else None,
            forward_step=self._yardsticks.time_forward(concurrency, mean_prompt + mean_answer // 2, NUM_FORWARDS),
            ttft=ttft.percentiles[0],
            inter_token=inter_token.percentiles[0],
            server_step=server_seconds / num_steps,
        )

    def _read_server(self) -> tuple[float, int]:
        """Returns the CPU that serving gRPC has taken so far, and the number of steps run."""
        metrics = fetch_metrics(self._stack.engine_metrics_url)
        return read_server_seconds(self._stack.engine_pid), metrics.sum("ringplan_step_rows_count") or 0

    def _time_generate(self, requests: Sequence[LoadRequest], batch_size: int, *, is_continuous: bool = False) -> float:
        prompts = [self._builder.build(request, 0).token_ids.ids for request in requests]
        num_new = [request.max_tokens for request in requests]
        return self._yardsticks.time_generate(prompts, num_new, batch_size, is_continuous=is_continuous)

    def _send(self, requests: Sequence[LoadRequest], concurrency: int) -> list[RequestRecord]:
        """Sends requests, so many at once, each when one before it has ended."""
        records = build_records(requests)
        started = time.perf_counter()

        async def send_all() -> None:
            nonlocal started
            places = asyncio.Semaphore(concurrency)
            caller = InferenceCaller(
                self._stack.target,
                lambda record: self._builder.build(record.request, record.number),
                lambda: time.perf_counter() - started,
                TIMEOUT_SECONDS,
            )
            async with caller:
                started = time.perf_counter()

                async def send(record: RequestRecord) -> None:
                    async with places:
                        await caller.send(record)

                await asyncio.gather(*map(send, records))

        asyncio.run(send_all())
        for record in records:
            if record.outcome is not Outcome.COMPLETED or record.num_answer_tokens != record.request.max_tokens:
                raise CommandError(f"a request was not completed: {record.reason} {record.details}")
        return [_make_due_when_sent(record) for record in records]


def _make_due_when_sent(record: RequestRecord) -> RequestRecord:
    """Latencies count from when a request was due; in a closed loop that is when there was a place for it."""
    return replace(record, request=replace(record.request, arrival_seconds=record.sent_seconds or 0.0))


def _find_median_if_any(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

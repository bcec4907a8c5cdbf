"""`ringplan bench engine`: latencies of requests that come when they come."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.bench_engine import TIMEOUT_SECONDS
from ringplan_cli.errors import CommandError
from ringplan_cli.load.calls import InferenceCaller
from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.options import LatencyTargets, LoadOptions
from ringplan_cli.load.records import Outcome, build_records
from ringplan_cli.load.report import PERCENTILES, build_report
from ringplan_cli.load.runner import send_on_schedule
from ringplan_cli.load.schedule import build_schedule


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """Latencies under Poisson arrivals.

    Args:
        rate: requests a second, on average.
        num_requests: requests sent.
        max_in_flight: requests under way at once, at most.
        ttft_seconds: times to first token, by percentile.
        inter_token_seconds: times between tokens, by percentile.
    """

    rate: float
    num_requests: int
    max_in_flight: int
    ttft_seconds: dict[str, float]
    inter_token_seconds: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            "rate": self.rate,
            "requests": self.num_requests,
            "max_in_flight": self.max_in_flight,
            "ttft_seconds": self.ttft_seconds,
            "inter_token_seconds": self.inter_token_seconds,
        }

    def as_texts(self) -> tuple[str, ...]:
        """Returns the figures as a row for people."""
        times = (*self.ttft_seconds.values(), *self.inter_token_seconds.values())
        return (
            f"{self.rate:.2f}",
            f"{self.num_requests:,}",
            f"{self.max_in_flight:,}",
            *(f"{seconds * 1e3:,.0f}" for seconds in times),
        )


def measure_arrivals(target: str, info: pb.GetModelInfoResponse, options: LoadOptions) -> ArrivalFigures:
    """Sends requests at random moments and waits for their answers.

    Args:
        target: the engine.
        info: what it has loaded.
        options: the requests.

    Raises:
        CommandError: a request was not completed.
    """
    requests = build_schedule(options)
    builder = MessageBuilder(info.vocab_size, info.eos_token_ids, options)
    records = build_records(requests)
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    async def send_all() -> None:
        nonlocal started
        caller = InferenceCaller(
            target, lambda record: builder.build(record.request, record.number), clock, TIMEOUT_SECONDS
        )
        async with caller:
            started = time.perf_counter()
            await send_on_schedule(records, caller.send, clock)

    asyncio.run(send_all())
    for record in records:
        if record.outcome is not Outcome.COMPLETED:
            raise CommandError(f"a request was not completed: {record.reason} {record.details}")
    report = build_report(records, LatencyTargets(), clock())
    spreads = [report.latencies[name] for name in ("ttft", "inter_token")]
    ttft, inter_token = (
        {f"p{rank}": value for rank, value in zip(PERCENTILES, spread.percentiles if spread else (), strict=True)}
        for spread in spreads
    )
    return ArrivalFigures(options.rate, len(records), report.max_in_flight, ttft, inter_token)

"""One load test: everything between a schedule and its records."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.errors import BadSettingsError, CommandError
from ringplan_cli.load.calls import InferenceCaller
from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.records import Outcome, RequestRecord, build_records
from ringplan_cli.load.runner import run_until_stopped, send_on_schedule
from ringplan_cli.load.schedule import LoadRequest

WriteRecord = Callable[[RequestRecord], None]


@dataclass(slots=True)
class LoadState:
    """How far a load test is.

    Args:
        num_requests: of the schedule.
        num_sent: sent so far.
        num_ended: ended so far.
        num_tokens: tokens that have come.
        seconds: since the start.
    """

    num_requests: int
    num_sent: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load test measured.

    Args:
        records: of every request, in the order of the schedule.
        seconds: from the start to the last end, or to where it was cut off.
        signal_number: the signal that cut it off, or None.
    """

    records: list[RequestRecord]
    seconds: float
    signal_number: int | None


def run_load_test(
    target: str,
    requests: Sequence[LoadRequest],
    builder: MessageBuilder,
    *,
    timeout_seconds: float,
    write_record: WriteRecord,
    show: Callable[[LoadState], None],
) -> LoadResult:
    """Sends a load and waits for its end, or for SIGINT, SIGTERM or SIGHUP, which end it early.

    Args:
        target: the engine.
        requests: the load.
        builder: makes the messages.
        timeout_seconds: how long a request may take.
        write_record: called with each record when its request has ended.
        show: called several times a second.

    Raises:
        CommandError: the engine cannot be reached.
    """
    records = build_records(requests)
    state = LoadState(len(records))
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    def build(record: RequestRecord) -> pb.GenerateRequest:
        return builder.build(record.request, record.number)

    async def send_all(caller: InferenceCaller) -> None:
        nonlocal started
        async with caller:

            async def send(record: RequestRecord) -> None:
                state.num_sent += 1
                try:
                    await caller.send(record)
                finally:
                    state.num_ended += 1
                    write_record(record)

            started = time.perf_counter()
            await send_on_schedule(records, send, clock)

    async def run() -> tuple[None, int | None]:
        caller = InferenceCaller(target, build, clock, timeout_seconds)

        def tick() -> None:
            state.seconds, state.num_tokens = clock(), caller.num_tokens
            show(state)

        return await run_until_stopped(send_all(caller), tick)

    try:
        _, signal_number = asyncio.run(run())
    except TimeoutError as error:
        raise CommandError(f"no engine answers at {target}") from error
    ends = [record.ended_seconds for record in records if record.ended_seconds is not None]
    seconds = clock() if signal_number is not None else max(ends, default=0.0)
    return LoadResult(records, seconds, signal_number)


@contextmanager
def open_requests_file(path: Path | None) -> Iterator[WriteRecord]:
    """Yields what writes a record as a line of JSON, at once, so that nothing is lost with the process.

    Args:
        path: the file, which is overwritten; None writes nothing.

    Raises:
        BadSettingsError: the file cannot be written.
    """
    if path is None:
        yield lambda _record: None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise BadSettingsError(f"--requests-file: {path}: {error.strerror}") from error
    with file:

        def write(record: RequestRecord) -> None:
            if record.outcome is not Outcome.PENDING:
                file.write(json.dumps(record.as_json()) + "\n")
                file.flush()

        yield write

"""The load is open: requests go out when they are due, on a clock of the tests' own."""

import asyncio
import os
import signal

import pytest

from ringplan_cli.load.records import Outcome, RequestRecord, build_records
from ringplan_cli.load.runner import run_until_stopped, send_on_schedule
from ringplan_cli.load.schedule import LoadRequest


class ManualClock:
    """A clock that moves when somebody sleeps, by what was asked for and a given overshoot."""

    def __init__(self, overshoot_seconds: float = 0.0) -> None:
        self.now, self._overshoot_seconds = 0.0, overshoot_seconds

    def read(self) -> float:
        """Returns the time."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Lets others run, and then moves on."""
        await asyncio.sleep(0)
        if seconds:
            self.now += seconds + self._overshoot_seconds


def build(*arrivals: float) -> list[RequestRecord]:
    """Builds records of requests that are due at these times."""
    return build_records([LoadRequest(arrival, 1, 1, prompt_tokens=1) for arrival in arrivals])


def test_answers_that_never_come_delay_no_later_request() -> None:
    """Every request is sent when it is due although none before it has ended."""
    clock, records, last = ManualClock(), build(0.0, 0.5, 0.5, 2.0), asyncio.Event()

    async def send(record: RequestRecord) -> None:
        record.sent_seconds = clock.read()
        if record.number == 3:
            last.set()
        await last.wait()

    assert asyncio.run(send_on_schedule(records, send, clock.read, clock.sleep))
    assert [record.sent_seconds for record in records] == pytest.approx([0.0, 0.5, 0.5, 2.0])


def test_late_request_does_not_shift_those_after_it() -> None:
    """A sleep that lasts 0.3 s too long makes what was due meanwhile late, and nothing else; records say how late."""
    clock, records = ManualClock(overshoot_seconds=0.3), build(0.0, 1.0, 1.2, 3.0)

    async def send(record: RequestRecord) -> None:
        record.sent_seconds = clock.read()

    asyncio.run(send_on_schedule(records, send, clock.read, clock.sleep))
    assert [record.lag_seconds for record in records] == pytest.approx([0.0, 0.3, 0.1, 0.3])


def test_cancelling_cuts_off_what_is_under_way_and_sends_no_more() -> None:
    """What was measured so far stays."""
    clock, records = ManualClock(), build(0.0, 1.0, 2.0, 3.0)
    cancelled = []

    async def send(record: RequestRecord) -> None:
        record.outcome = Outcome.RUNNING
        if record.number == 0:
            record.outcome = Outcome.COMPLETED
            return
        if record.number == 2:
            running.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(record.number)
            raise

    async def run() -> bool:
        nonlocal running
        running = asyncio.ensure_future(send_on_schedule(records, send, clock.read, clock.sleep))
        return await running

    running: asyncio.Future[bool]
    assert asyncio.run(run()) is False
    assert cancelled == [1, 2]
    assert [record.outcome for record in records] == [
        Outcome.COMPLETED,
        Outcome.RUNNING,
        Outcome.RUNNING,
        Outcome.PENDING,
    ]


def test_send_that_breaks_ends_the_run() -> None:
    """A fault of the generator's own is no figure."""

    async def send(record: RequestRecord) -> None:
        raise KeyError(record.number)

    with pytest.raises(KeyError):
        asyncio.run(send_on_schedule(build(0.0), send, lambda: 0.0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_cuts_the_run_off_and_is_told(number: signal.Signals) -> None:
    """Its result counts all the same; whoever handled the signal before does so again."""
    before = signal.getsignal(number)

    async def wait() -> str:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # A second one while the first is obeyed changes nothing.
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        return "so far"

    assert asyncio.run(run_until_stopped(wait(), lambda: None)) == ("so far", number)
    assert signal.getsignal(number) == before


def test_run_that_ends_by_itself_had_no_signal() -> None:
    """The usual case."""

    async def end() -> int:
        return 3

    assert asyncio.run(run_until_stopped(end(), lambda: None)) == (3, None)


def test_tick_that_raises_ends_the_run() -> None:
    """A process that died is told at once, and the run does not go on without it."""
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def tick() -> None:
        raise RuntimeError("the engine was killed")

    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(run_until_stopped(wait(), tick))

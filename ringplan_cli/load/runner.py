"""Runs a load: sends each request when it is due, whatever became of those before it."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from ringplan_cli.load.calls import Send
from ringplan_cli.load.records import RequestRecord

TICK_SECONDS = 0.2

ResultT = TypeVar("ResultT")
Sleep = Callable[[float], Awaitable[None]]


async def send_on_schedule(
    records: Sequence[RequestRecord], send: Send, clock: Callable[[], float], sleep: Sleep = asyncio.sleep
) -> bool:
    """Sends requests when they are due and waits for all of them. To be cancelled to stop early.

    Args:
        records: of the requests, in the order of their arrival.
        send: sends one.
        clock: seconds from the start of the load.
        sleep: waits for so many seconds.

    Returns:
        Whether it ran to its end; if it was cancelled, what was under way has been cut off.
    """
    tasks: list[asyncio.Task[None]] = []
    try:
        for record in records:
            wait_seconds = record.request.arrival_seconds - clock()
            # Calls under way get their turn even where the schedule is behind.
            await sleep(max(0.0, wait_seconds))
            tasks.append(asyncio.ensure_future(send(record)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return True


async def run_until_stopped(run: Coroutine[Any, Any, ResultT], tick: Callable[[], None]) -> tuple[ResultT, int | None]:
    """Runs something that a signal may cut off.

    Args:
        run: what to run; a signal cancels it, and it returns all the same.
        tick: called again and again meanwhile; what it raises ends the run.

    Returns:
        What `run` returned, and the signal that came, if one did.
    """
    task, ticker = asyncio.ensure_future(run), asyncio.ensure_future(_repeat(tick))
    came: list[int] = []

    def stop(number: int) -> None:
        # A second one while the first is being obeyed changes nothing.
        if not came:
            task.cancel()
        came.append(number)

    with _handle_signals(stop):
        try:
            await asyncio.wait({task, ticker}, return_when=asyncio.FIRST_COMPLETED)
            if ticker.done():
                ticker.result()
        finally:
            ticker.cancel()
            if not came:
                task.cancel()
            await asyncio.gather(task, ticker, return_exceptions=True)
    return task.result(), came[0] if came else None


async def _repeat(tick: Callable[[], None]) -> None:
    while True:
        tick()
        await asyncio.sleep(TICK_SECONDS)


@contextlib.contextmanager
def _handle_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Hands SIGINT, SIGTERM and SIGHUP to `stop`, and afterwards to whom they went before."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

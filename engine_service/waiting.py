"""What an event loop needs to work with threads and to wait for whatever comes first."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_in_thread(function: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
    """Runs a function in a thread of its own.

    Unlike with `asyncio.to_thread`, nobody waits for the thread when the event loop ends.

    Args:
        function: what to run.

    Returns:
        Its result, or what it raised. It may be left without anyone waiting for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def set_result(result: ResultT) -> None:
        if not future.cancelled():
            future.set_result(result)

    def set_error(error: Exception) -> None:
        if not future.cancelled():
            future.set_exception(error)

    def work() -> None:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001  # Raised where the result is awaited.
            call_soon(loop, set_error, error)
        else:
            call_soon(loop, set_result, result)

    threading.Thread(target=work, daemon=True).start()
    return future


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Calls something in an event loop's thread; does nothing if the loop has ended: nobody waits there any more.

    Args:
        loop: the event loop.
        callback: what to call.
        args: what with.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def wait_for_first(*events: "asyncio.Event | asyncio.Future[Any]") -> None:
    """Waits until an event is set or a future is done; futures are left as they are.

    Args:
        events: what to wait for.
    """
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(event.wait()) if isinstance(event, asyncio.Event) else event for event in events
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for event, wait in zip(events, waits, strict=True):
        if wait is not event:
            wait.cancel()

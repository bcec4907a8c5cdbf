"""Rules of working with threads from an event loop."""

import asyncio
import threading

import pytest

from engine_service.waiting import call_soon, run_in_thread, wait_for_first


def test_result_comes_from_another_thread() -> None:
    """The function runs beside the loop, and its result is awaited."""

    async def main() -> bool:
        return await run_in_thread(threading.current_thread) is not threading.current_thread()

    assert asyncio.run(main())


def test_error_is_raised_where_the_result_is_awaited() -> None:
    """What the function raises is not lost."""

    def fail() -> None:
        raise ValueError("broken")

    async def main() -> None:
        await run_in_thread(fail)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())


def test_loop_ends_without_waiting_for_the_thread() -> None:
    """A thread that is still busy does not keep the loop from ending, and may end after it."""
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait()
        ended.set()

    async def main() -> None:
        started = asyncio.Event()
        run_in_thread(work)
        call_soon(asyncio.get_running_loop(), started.set)
        await started.wait()

    asyncio.run(main())
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(10)


def test_call_into_an_ended_loop_does_nothing() -> None:
    """Events that come after the end have nobody to go to."""

    async def get_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    call_soon(asyncio.run(get_loop()), lambda: None)


def test_waiting_ends_with_whatever_comes_first() -> None:
    """An event that is set ends the wait; a future that is not done stays usable."""

    async def main() -> str:
        event, future = asyncio.Event(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(event.set)
        await wait_for_first(event, future)
        assert not future.done()
        asyncio.get_running_loop().call_soon(future.set_result, "done")
        await wait_for_first(future, asyncio.Event())
        return str(future.result())

    assert asyncio.run(main()) == "done"

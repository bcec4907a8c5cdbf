"""`flashinfer_pool.py`: which wrapper the next schedule goes to."""

import gc

import pytest

from engine_service.attention_backends.flashinfer_pool import WrapperPool
from engine_service.attention_backends.flashinfer_wrapper import ScheduledWrapper


class _Batch:
    """Stands in for what uses a wrapper."""


class _Wrapper:
    """A wrapper whose schedule is set by hand; it counts as in use while one of its batches exists."""

    def __init__(self) -> None:
        self.key: tuple[bytes, ...] | None = None
        self.is_in_use = False

    def has_schedule(self, key: tuple[bytes, ...]) -> bool:
        return self.key == key


def take(pool: WrapperPool, name: bytes) -> _Wrapper:
    """Takes a wrapper for a schedule."""
    found = pool.find((name,))
    assert isinstance(found, _Wrapper)
    found.key = (name,)
    return found


@pytest.fixture
def pool() -> WrapperPool:
    """A pool of stand-ins."""
    return WrapperPool(_Wrapper)  # type: ignore[arg-type]


def test_two_wrappers_take_turns(pool: WrapperPool) -> None:
    """A third schedule goes to the one that has waited longer."""
    first, second = take(pool, b"1"), take(pool, b"2")
    assert first is not second
    assert [take(pool, name) for name in (b"3", b"4", b"5")] == [first, second, first]


def test_a_schedule_that_is_there_is_found(pool: WrapperPool) -> None:
    """Also if its wrapper is in use; and it counts as used last."""
    first, second = take(pool, b"1"), take(pool, b"2")
    first.is_in_use = True
    assert take(pool, b"1") is first
    first.is_in_use = False
    assert take(pool, b"3") is second


def test_a_wrapper_in_use_is_left_alone(pool: WrapperPool) -> None:
    """The other one serves, or a new one where both are in use."""
    first, second = take(pool, b"1"), take(pool, b"2")
    first.is_in_use = True
    assert take(pool, b"3") is second
    second.is_in_use = True
    third = take(pool, b"4")
    assert third not in (first, second)
    third.is_in_use = True
    second.is_in_use = False
    assert take(pool, b"5") is second


def test_a_wrapper_is_in_use_as_long_as_a_batch_of_its_exists() -> None:
    """Nobody has to give it back."""
    wrapper = ScheduledWrapper(object(), lambda *_: None, None, None, verifies=False)  # type: ignore[arg-type]
    first, second = _Batch(), _Batch()
    wrapper.add_user(first)
    wrapper.add_user(second)
    del first
    gc.collect()
    assert wrapper.is_in_use
    del second
    gc.collect()
    assert not wrapper.is_in_use

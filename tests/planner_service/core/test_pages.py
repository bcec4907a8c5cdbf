"""The page pool: order of hand-out, reference counts, and all-or-nothing."""

import resource
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner_service.core.layout import Int32Array
from planner_service.core.pages import PagePool
from planner_service.errors import OutOfPagesError


def as_pages(*pages: int) -> Int32Array:
    """Returns pages as the pool takes them."""
    return np.array(pages, dtype=np.int32)


def test_pages_are_handed_out_from_one_up_and_the_sink_page_never() -> None:
    """A new pool hands out 1, 2, 3, ... and is empty before it would reach the sink page."""
    pool = PagePool(5)
    assert pool.take(3).tolist() == [1, 2, 3]
    assert pool.take(1).tolist() == [4]
    with pytest.raises(OutOfPagesError):
        pool.take(1)


def test_a_pool_costs_memory_only_for_pages_that_have_been_handed_out() -> None:
    """The largest pool that a session may ask for is made at once, and hands pages out like any other."""
    before = _read_resident_bytes()
    pool = PagePool((1 << 31) - (1 << 24))
    pool.give_back(pool.take(2))
    assert pool.take(3).tolist() == [3, 4, 5]
    assert _read_resident_bytes() - before < 64 << 20


def _read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_freed_pages_go_to_the_back_in_the_order_given() -> None:
    """Pages come back after those that were free before, in the order in which they were given back."""
    pool = PagePool(7)
    pool.take(4)
    pool.give_back(as_pages(4, 1))
    pool.give_back(as_pages(3))
    assert pool.take(5).tolist() == [5, 6, 4, 1, 3]


def test_a_refused_take_takes_nothing_and_says_how_many_are_missing() -> None:
    """Taking more than is free raises with the missing number, and the queue stands as it was."""
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(OutOfPagesError) as refusal:
        pool.take(5)
    assert (refusal.value.num_short, refusal.value.num_free) == (3, 2)
    assert pool.take(2).tolist() == [2, 3]


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back() -> None:
    """A page with two holders stays held after the first gives it back."""
    pool = PagePool(4)
    pages = pool.take(2)
    pool.share(as_pages(2))
    assert pool.num_shared == 1
    assert pool.has_other_holders(pages).tolist() == [False, True]
    pool.give_back(pages)
    assert (pool.num_free, pool.num_shared) == (2, 0)
    pool.give_back(as_pages(2))
    assert pool.take(3).tolist() == [3, 1, 2]


def test_taken_back_pages_stand_at_the_front_again() -> None:
    """Undoing a take leaves the order of hand-out as if nothing had been taken."""
    pool = PagePool(6)
    pool.take(2)
    pool.give_back(as_pages(2, 1))
    pool.untake(pool.take(4))
    assert pool.num_free == 5
    assert pool.take(5).tolist() == [3, 4, 5, 2, 1]


@pytest.mark.parametrize("num_holders", [[0, 0, 1], [0, 1, 0], [0, 2, 1]])
def test_integrity_fails_when_holders_do_not_add_up(num_holders: list[int]) -> None:
    """Holders that differ from the reference counts are found."""
    pool = PagePool(3)
    pool.take(2)
    pool.check_integrity(np.array([0, 1, 1], dtype=np.int32))
    with pytest.raises(AssertionError):
        pool.check_integrity(np.array(num_holders, dtype=np.int32))


class PoolAgainstQueue(RuleBasedStateMachine):
    """The pool against a plain deque and a dict of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.free = deque(range(1, 9))
        self.holders: dict[int, int] = {}
        self.last_taken: list[int] | None = None

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        """Takes pages, or is refused where the deque is too short."""
        if count > len(self.free):
            with pytest.raises(OutOfPagesError) as refusal:
                self.pool.take(count)
            assert refusal.value.num_short == count - len(self.free)
            return
        expected = [self.free.popleft() for _ in range(count)]
        assert self.pool.take(count).tolist() == expected
        self.holders.update(dict.fromkeys(expected, 1))
        self.last_taken = expected

    @precondition(lambda self: self.last_taken is not None)
    @rule()
    def untake(self) -> None:
        """Undoes a take that nothing has followed."""
        assert self.last_taken is not None
        self.pool.untake(as_pages(*self.last_taken))
        self.free.extendleft(reversed(self.last_taken))
        for page in self.last_taken:
            del self.holders[page]
        self.last_taken = None

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Takes one holder off some pages."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True))
        self.pool.give_back(as_pages(*pages))
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                self.free.append(page)
        self.last_taken = None

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Adds a holder to some pages."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True))
        self.pool.share(as_pages(*pages))
        for page in pages:
            self.holders[page] += 1
        self.last_taken = None

    @invariant()
    def counts_agree(self) -> None:
        """Free, shared and held pages are what the model says."""
        holders = np.zeros(9, dtype=np.int32)
        for page, count in self.holders.items():
            holders[page] = count
        self.pool.check_integrity(holders)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_shared == sum(count > 1 for count in self.holders.values())


PoolAgainstQueue.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPoolAgainstQueue = PoolAgainstQueue.TestCase

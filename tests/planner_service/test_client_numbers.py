"""Stream numbers: given at first use, taken back by a drop."""

import pytest

from planner_service.client_numbers import StreamNumbers
from planner_service.errors import InvalidLayoutError


def test_numbers_are_given_from_0_up_and_stay() -> None:
    """Every (request, label) gets the next number at its first use and keeps it."""
    numbers = StreamNumbers(8)
    assert numbers.assign([("a", "main"), ("b", "main")]) == {("a", "main"): 0, ("b", "main"): 1}
    assert numbers.assign([("b", "main"), ("a", "cfg")]) == {("b", "main"): 1, ("a", "cfg"): 2}
    assert numbers.find(("a", "cfg")) == 2
    assert numbers.find(("a", "img")) is None
    assert numbers.find(("c", "main")) is None


def test_a_drop_returns_the_numbers_in_the_order_of_first_use_and_frees_them() -> None:
    """A dropped request's numbers come back in the order its labels were first used, and serve the next requests."""
    numbers = StreamNumbers(4)
    numbers.assign([("a", "cfg"), ("b", "main"), ("a", "main")])
    assert numbers.drop("a") == [0, 2]
    assert numbers.drop("a") == []
    assert numbers.assign([("c", "main"), ("d", "main"), ("e", "main")]) == {
        ("c", "main"): 0,
        ("d", "main"): 2,
        ("e", "main"): 3,
    }


def test_too_many_streams_are_refused_and_change_nothing() -> None:
    """A layout that needs more numbers than are left gives out none."""
    numbers = StreamNumbers(2)
    numbers.assign([("a", "main")])
    with pytest.raises(InvalidLayoutError, match="2 new streams are needed and 1 of max_streams 2 are left"):
        numbers.assign([("a", "main"), ("b", "main"), ("c", "main")])
    assert numbers.find(("b", "main")) is None
    assert numbers.assign([("b", "main")]) == {("b", "main"): 1}

"""`sampling_params.py`: ranges as the protocol has them."""

import math
from typing import Any

import pytest

from engine_service.errors import InvalidRequestError
from engine_service.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 100.5),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_and_value(field: str, value: Any) -> None:
    """The field is named as in the protocol."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == f"sampling.{field}"
    assert str(value) in caught.value.rule


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 100.0, "seed": 2**64 - 1},
        {"temperature": 0.0, "top_k": 0, "top_p": 1e-9, "min_p": 0.0, "seed": 0, "repetition_penalty": 1e-3},
    ],
)
def test_the_borders_of_the_ranges_are_taken(given: dict[str, Any]) -> None:
    """Defaults too."""
    assert SamplingParams(**given).is_greedy == (given.get("temperature", 0.0) == 0.0)

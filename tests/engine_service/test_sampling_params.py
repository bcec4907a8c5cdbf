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
        ("presence_penalty", 2.01),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.01),
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
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "logit_bias": ((0, -100.0), (1, 100.0))},
        {"logit_bias": tuple((token_id, 1.0) for token_id in range(1_024))},
    ],
)
def test_the_borders_of_the_ranges_are_taken(given: dict[str, Any]) -> None:
    """Defaults too."""
    assert SamplingParams(**given).is_greedy == (given.get("temperature", 0.0) == 0.0)


@pytest.mark.parametrize(
    ("logit_bias", "rule"),
    [
        (((7, 100.5),), "100.5 as for token 7"),
        (((1, 0.0), (7, -100.5)), "-100.5 as for token 7"),
        (((7, math.nan),), "nan as for token 7"),
        (tuple((token_id, 1.0) for token_id in range(1_025)), "1025 tokens are more than 1024"),
    ],
)
def test_a_bias_out_of_range_is_refused_with_its_token(logit_bias: tuple[tuple[int, float], ...], rule: str) -> None:
    """As is a bias for too many tokens."""
    with pytest.raises(InvalidRequestError, match=rule) as caught:
        SamplingParams(logit_bias=logit_bias)
    assert caught.value.field == "sampling.logit_bias"

"""Rules of requests as they are asked for, and of what the engine counts on them."""

import pytest

from engine_service.errors import InvalidRequestError
from engine_service.request import GenerationSpec, Request, StoppingParams


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("stopping.max_tokens", {"max_tokens": 0}),
        ("stopping.max_tokens", {"max_tokens": -5}),
        ("stopping.stop", {"stop": ("",)}),
        ("stopping.stop", {"stop": ("x" * 257,)}),
        ("stopping.stop", {"stop": tuple("abcdefghijklmnopq")}),
        ("stopping.stop_token_ids", {"stop_token_ids": tuple(range(65))}),
    ],
)
def test_stopping_params_out_of_range_name_their_field(field: str, given: dict[str, object]) -> None:
    """A value that breaks its rule is refused with the field as the proto names it."""
    with pytest.raises(InvalidRequestError) as caught:
        StoppingParams(**given)  # type: ignore[arg-type]  # The cases have different types.
    assert caught.value.field == field


def test_stopping_params_at_their_limits_pass() -> None:
    """16 stop strings of 256 characters and 64 stop tokens are allowed."""
    StoppingParams(max_tokens=1, stop=("x" * 256,) * 16, stop_token_ids=tuple(range(64)))


@pytest.mark.parametrize("num_logprobs", [-1, 21])
def test_logprobs_out_of_range_are_refused(num_logprobs: int) -> None:
    """0 to 20 of the likeliest tokens can be asked for."""
    with pytest.raises(InvalidRequestError, match=rf"logprobs: {num_logprobs}"):
        GenerationSpec("r", (1,), num_logprobs=num_logprobs)


def test_request_counts_its_tokens() -> None:
    """Prompt, generated and missing tokens follow from what was added and computed."""
    request = Request(GenerationSpec("r", (1, 2, 3)), arrival=1, max_tokens=5)
    request.streams[0].num_computed_tokens = 3
    request.token_ids.append(9)
    assert (request.num_prompt_tokens, request.num_generated_tokens, request.num_missing_tokens) == (3, 1, 1)

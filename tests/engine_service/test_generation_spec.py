"""Rules of further contexts and samples as they are asked for."""

import math

import pytest

from engine_service.errors import InvalidRequestError
from engine_service.request import GenerationSpec, GuidanceContext
from engine_service.sampling_params import SamplingParams


@pytest.mark.parametrize("scale", [-0.5, 100.5, math.nan, math.inf])
def test_scale_out_of_range_is_refused(scale: float) -> None:
    """A scale is 0 to 100, and the context that has another one is named."""
    with pytest.raises(InvalidRequestError) as caught:
        GenerationSpec("r", (1,), guidance=(GuidanceContext((2,), 1.0), GuidanceContext((2,), scale)))
    assert caught.value.field == "guidance[1].scale"


def test_more_than_two_contexts_are_refused() -> None:
    """There are labels for two."""
    with pytest.raises(InvalidRequestError, match="guidance: 3 contexts"):
        GenerationSpec("r", (1,), guidance=(GuidanceContext((2,), 1.0),) * 3)


@pytest.mark.parametrize("num_samples", [0, -1])
def test_fewer_than_one_sample_is_refused(num_samples: int) -> None:
    """A request has an answer."""
    with pytest.raises(InvalidRequestError, match="n: "):
        GenerationSpec("r", (1,), num_samples=num_samples)


def test_seeds_of_samples_rise_by_one_and_start_again_at_their_end() -> None:
    """Sample i has the seed of the request plus i, modulo 2^64; everything else is the request's."""
    spec = GenerationSpec("r", (1, 2), sampling=SamplingParams(temperature=1.0, seed=2**64 - 2), num_samples=4)
    samples = spec.split_samples()
    assert [sample.sampling.seed for sample in samples] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert [sample.request_id for sample in samples] == ["r#0", "r#1", "r#2", "r#3"]
    assert {(sample.prompt_token_ids, sample.num_samples, sample.sampling.temperature) for sample in samples} == {
        ((1, 2), 1, 1.0)
    }


def test_samples_without_a_seed_have_none() -> None:
    """Each is random by itself."""
    samples = GenerationSpec("r", (1,), sampling=SamplingParams(temperature=1.0), num_samples=2).split_samples()
    assert [sample.sampling.seed for sample in samples] == [None, None]


def test_single_sample_is_the_request_itself() -> None:
    """Nothing is renamed where there is nothing to tell apart."""
    spec = GenerationSpec("r", (1,))
    assert spec.split_samples() == [spec]


def test_prompt_is_told_of_once() -> None:
    """Echo and prompt log-probabilities come with the first sample alone."""
    spec = GenerationSpec("r", (1, 2), num_prompt_logprobs=1, echoes_prompt=True, num_samples=3)
    assert [sample.tells_prompt for sample in spec.split_samples()] == [True, False, False]

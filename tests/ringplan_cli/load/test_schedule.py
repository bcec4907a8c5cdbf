"""A schedule is drawn from its seed alone, at the rate and with the burstiness that were asked for."""

import dataclasses

import numpy as np
import pytest

from ringplan_cli.load.options import LoadOptions
from ringplan_cli.load.schedule import LoadRequest, build_schedule, fit_to_context


def build(**options: object) -> list[LoadRequest]:
    """Draws a load."""
    return build_schedule(LoadOptions.model_validate(options))


def read_gaps(**options: object) -> np.ndarray:
    """Returns the times between arrivals."""
    return np.diff([request.arrival_seconds for request in build(**options)])


def test_same_seed_gives_the_same_load() -> None:
    """Times, lengths, kinds and prompts; another seed changes all of them."""
    mixed = {"requests": 200, "guided_share": 0.3, "samples_share": 0.3, "rate": 5.0, "answer_tokens": "uniform:1-500"}
    assert build(**mixed, seed=4) == build(**mixed, seed=4)
    ours, others = build(**mixed, seed=4), build(**mixed, seed=5)
    assert all(
        [getattr(request, field.name) for request in ours] != [getattr(request, field.name) for request in others]
        for field in dataclasses.fields(LoadRequest)
        if field.name != "text"
    )


def test_higher_rate_brings_the_same_requests_sooner() -> None:
    """Two rates can be compared: only the times differ, by the same factor."""
    slow, fast = build(rate=2.0), build(rate=8.0)
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival_seconds == pytest.approx(4 * other.arrival_seconds)
        assert dataclasses.replace(one, arrival_seconds=0) == dataclasses.replace(other, arrival_seconds=0)


def test_more_requests_begin_with_the_same_ones() -> None:
    """A longer test is a shorter one that goes on."""
    assert build(requests=500)[:100] == build(requests=100)


def test_other_lengths_leave_arrivals_as_they_are() -> None:
    """Each property has a random stream of its own."""
    one, other = build(), build(answer_tokens="uniform:1-9", guided_share=1.0)
    assert [request.arrival_seconds for request in one] == [request.arrival_seconds for request in other]
    assert [request.prompt_tokens for request in one] == [request.prompt_tokens for request in other]


def test_arrivals_of_burstiness_1_are_a_poisson_process() -> None:
    """Gaps are exponential: mean and standard deviation 1 / rate, and a share e^-1 of them longer than that."""
    gaps = read_gaps(rate=4.0, requests=20_000)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.02)


@pytest.mark.parametrize("burstiness", [0.25, 3.0])
def test_burstiness_is_the_variation_of_the_gaps_at_the_same_rate(burstiness: float) -> None:
    """Standard deviation over mean; the mean stays."""
    gaps = read_gaps(rate=4.0, requests=50_000, burstiness=burstiness)
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.06)


def test_no_burstiness_is_a_clock() -> None:
    """Every gap is the same."""
    assert read_gaps(rate=10.0, requests=50, burstiness=0).tolist() == pytest.approx([0.1] * 49)


def test_infinite_rate_sends_all_at_once() -> None:
    """Everything is due at the start."""
    assert {request.arrival_seconds for request in build(rate="inf", requests=9)} == {0.0}


def test_infinite_rate_needs_a_number_of_requests() -> None:
    """It would never end."""
    with pytest.raises(ValueError, match="'inf' needs --requests"):
        LoadOptions.model_validate({"rate": "inf", "duration_seconds": 5})


def test_duration_ends_the_arrivals() -> None:
    """A clock of 10 a second has 20 arrivals in two seconds, the first at 0; a number of requests may end it sooner."""
    options = {"rate": 10.0, "burstiness": 0, "duration_seconds": 1.95}
    assert len(build(**options)) == 20
    assert len(build(**options, requests=7)) == 7


def test_default_is_a_hundred_requests() -> None:
    """A command without flags ends."""
    assert len(build()) == 100


def test_load_without_end_is_refused() -> None:
    """A slip of the finger does not fill the memory."""
    with pytest.raises(ValueError, match="at most 1,000,000 requests"):
        build(rate=1e9, burstiness=0, duration_seconds=1e6, prompt_tokens="1", answer_tokens="1")


def test_shares_of_guided_requests_and_of_samples_are_as_asked() -> None:
    """The two are independent; contexts are as long as the prompt."""
    requests = build(requests=10_000, guided_share=0.2, guidance_contexts=2, samples_share=0.5, samples=3)
    guided = np.array([bool(request.guidance_tokens) for request in requests])
    sampled = np.array([request.n == 3 for request in requests])
    assert guided.mean() == pytest.approx(0.2, abs=0.02)
    assert sampled.mean() == pytest.approx(0.5, abs=0.025)
    assert (guided & sampled).mean() == pytest.approx(0.1, abs=0.015)
    assert all(request.guidance_tokens in {(), (request.prompt_tokens,) * 2} for request in requests)


def test_requests_are_shortened_to_the_models_context() -> None:
    """The answer gives way first; a prompt leaves room for one token; what fits stays."""
    requests = [
        LoadRequest(0.0, 1, max_tokens=10, prompt_tokens=90),
        LoadRequest(1.0, 2, max_tokens=20, prompt_tokens=90),
        LoadRequest(2.0, 3, max_tokens=20, prompt_tokens=500, guidance_tokens=(500,)),
        LoadRequest(3.0, 4, max_tokens=20, prompt_tokens=10, guidance_tokens=(95,)),
        LoadRequest(4.0, 5, max_tokens=500, text="hello"),
    ]
    fitted, num_shortened = fit_to_context(requests, 100)
    assert [(request.prompt_tokens, request.guidance_tokens, request.max_tokens) for request in fitted] == [
        (90, (), 10),
        (90, (), 10),
        (99, (99,), 1),
        (10, (95,), 5),
        (None, (), 500),
    ]
    assert num_shortened == 3

"""`sampling.py`: the distributions are transformers', and a request's tokens are its own affair."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_service.sampling import Sampler, SamplingParams, SamplingState

VOCAB_SIZE = 60
PROMPT = [3, 4, 5, 5]


def build_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Random logits."""
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 2


def build_state(params: SamplingParams, num_logprobs: int | None = None) -> SamplingState:
    """A request's state after its prompt."""
    return SamplingState(params, PROMPT, vocab_size=VOCAB_SIZE, num_logprobs=num_logprobs)


def sample_ids(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """The chosen tokens."""
    return [token.token_id for token in Sampler().sample(logits, states)]


def build_expected_distribution(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """What transformers would draw from, with its processors in the order of its `generate`."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(processors(torch.LongTensor([PROMPT]), logits.clone()), dim=-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(temperature=1.0, repetition_penalty=2.0),
        SamplingParams(temperature=1.0, logit_bias=((3, 4.0), (9, -100.0), (59, 2.5))),
        SamplingParams(temperature=1.2, logit_bias=((3, 5.0), (4, -2.0)), repetition_penalty=1.7, top_k=30),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    ],
)
def test_samples_follow_the_distribution_of_transformers(params: SamplingParams) -> None:
    """Over many draws each token comes as often as its probability says, and one without probability never."""
    logits = build_logits(1)
    expected = build_expected_distribution(params, logits)
    num_draws = 4000
    states = [build_state(dataclasses.replace(params, seed=seed)) for seed in range(num_draws)]
    counts = Counter(sample_ids(logits.expand(num_draws, -1), states))
    assert all(expected[token_id] > 0 for token_id in counts)
    shares = torch.tensor([counts[token_id] / num_draws for token_id in range(VOCAB_SIZE)])
    # Five standard deviations of a binomial share.
    assert bool(((shares - expected).abs() <= 5 * (expected * (1 - expected) / num_draws).sqrt() + 1e-9).all())


def test_greedy_takes_the_likeliest_after_the_penalty() -> None:
    """Seeds and filters do not matter at temperature 0."""
    logits = build_logits(3)
    logits[1, 5] = 30.0
    states = [
        build_state(SamplingParams()),
        build_state(SamplingParams(repetition_penalty=100.0)),
        build_state(SamplingParams(top_p=0.1, seed=4)),
    ]
    penalized = RepetitionPenaltyLogitsProcessor(100.0)(torch.tensor([PROMPT]), logits[1:2].clone())
    expected = [int(logits[0].argmax()), int(penalized[0].argmax()), int(logits[2].argmax())]
    assert sample_ids(logits, states) == expected
    assert expected[1] != 5


@pytest.mark.parametrize("temperature", [1e-10, 1e-38, 1e-45])
@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float, given: dict[str, float]) -> None:
    """Logits divided by it would be infinite, and every probability NaN."""
    logits = build_logits(3)
    states = [build_state(SamplingParams(temperature=temperature, seed=1, **given)) for _ in logits]  # type: ignore[arg-type]  # top_k is a whole number.
    assert sample_ids(logits, states) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tiny_penalty_takes_what_was_seen(temperature: float) -> None:
    """Logits of seen tokens divided by it are infinite, which leaves no probabilities to draw from."""
    logits = build_logits(1)
    logits[0, PROMPT[0]] = 1.0
    state = build_state(SamplingParams(temperature=temperature, seed=1, repetition_penalty=1e-45))
    (token_id,) = sample_ids(logits, [state])
    assert token_id in {one for one in PROMPT if logits[0, one] > 0}


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    """Alone, or among requests with other settings, in any place."""
    params = SamplingParams(temperature=1.2, top_k=30, seed=7)
    others = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=2.0, min_p=0.1, repetition_penalty=1.5),
    ]
    steps = [build_logits(1, seed=step) for step in range(20)]
    alone = build_state(params)
    expected = [sample_ids(logits, [alone])[0] for logits in steps]
    for place in range(4):
        states = [build_state(one) for one in others]
        states.insert(place, build_state(params))
        found = []
        for step, logits in enumerate(steps):
            batch = build_logits(4, seed=100 + step)
            batch[place] = logits[0]
            found.append(sample_ids(batch, states)[place])
        assert found == expected
    assert len(set(expected)) > 5


def test_requests_without_a_seed_differ() -> None:
    """Each is random by itself."""
    logits = torch.zeros((40, VOCAB_SIZE))
    assert len(set(sample_ids(logits, [build_state(SamplingParams(temperature=1.0)) for _ in range(40)]))) > 5


def test_every_seed_of_the_protocol_is_taken() -> None:
    """0 to 2^64 - 1, each its own."""
    logits = torch.zeros((1, VOCAB_SIZE))
    found = set()
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        state = build_state(SamplingParams(temperature=1.0, seed=seed))
        found.add(tuple(sample_ids(logits, [state])[0] for _ in range(8)))
    assert len(found) == 5


def test_generated_tokens_count_as_seen() -> None:
    """The penalty keeps a greedy request from taking the same token twice."""
    logits = torch.zeros((1, VOCAB_SIZE))
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.0, 1.9
    state = build_state(SamplingParams(repetition_penalty=1.6))
    assert [sample_ids(logits, [state])[0] for _ in range(3)] == [10, 11, 12]


def test_count_penalties_follow_the_answer_and_not_the_prompt() -> None:
    """A greedy run equals a dense reference by the OpenAI API's formula, over the tokens chosen so far alone."""
    presence, frequency = 0.7, 0.4
    state = build_state(SamplingParams(presence_penalty=presence, frequency_penalty=frequency))
    logits = build_logits(1, seed=5) / 2
    answer: list[int] = []
    for _ in range(60):
        scores = logits[0].tolist()
        for token_id, count in Counter(answer).items():
            scores[token_id] -= count * frequency + presence
        answer.append(max(range(VOCAB_SIZE), key=scores.__getitem__))
        assert sample_ids(logits, [state]) == answer[-1:]
    assert len(set(answer)) > 10


def test_tokens_that_end_the_answer_wait_for_min_tokens() -> None:
    """The same step is the first to allow them as with transformers, and other rows are not concerned."""
    end_token_ids = [7, 8]
    logits = build_logits(1, seed=6)
    logits[0, 7], logits[0, 8] = 20.0, 30.0
    waiting = SamplingState(SamplingParams(), PROMPT, vocab_size=VOCAB_SIZE, min_tokens=3, end_token_ids=end_token_ids)
    other = build_state(SamplingParams())
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, end_token_ids)
    answer: list[int] = []
    for _ in range(5):
        scores = processor(torch.LongTensor([PROMPT + answer]), logits.clone())
        answer.append(int(scores.argmax()))
        assert sample_ids(logits.expand(2, -1), [waiting, other]) == [answer[-1], 8]
    assert answer[:3].count(8) == 0
    assert answer[3:] == [8, 8]


def test_a_ban_holds_against_the_largest_bias() -> None:
    """`min_tokens` is a promise; a bias is a wish."""
    params = SamplingParams(temperature=5.0, seed=1, logit_bias=((7, 100.0),))
    states = [
        SamplingState(params, PROMPT, vocab_size=VOCAB_SIZE, min_tokens=1, end_token_ids=[7]),
        SamplingState(params, PROMPT, vocab_size=VOCAB_SIZE),
    ]
    first, second = sample_ids(build_logits(1).expand(2, -1), states)
    assert first != 7
    assert second == 7


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    """Before temperature, penalty and truncation, for the rows that ask, as many as each asks for."""
    logits = build_logits(4)
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=1, repetition_penalty=1.7, presence_penalty=2.0, logit_bias=((5, 9.0),)
    )
    states = [build_state(params, num_logprobs=count) for count in (None, 0, 2, 5)]
    tokens = Sampler().sample(logits, states)
    expected = torch.log_softmax(logits, dim=-1)
    assert tokens[0].logprob is None
    assert tokens[0].top_logprobs == ()
    for row in (1, 2, 3):
        token = tokens[row]
        assert token.logprob == pytest.approx(expected[row, token.token_id].item(), abs=1e-6)
        count = states[row].num_logprobs or 0
        values, ids = expected[row].topk(count)
        assert [top.token_id for top in token.top_logprobs] == ids.tolist()
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-6)


def test_the_models_logits_are_left_alone() -> None:
    """They may be read again."""
    logits = build_logits(2)
    before = logits.clone()
    settings = (
        SamplingParams(temperature=1.0, top_k=2, repetition_penalty=3.0),
        SamplingParams(repetition_penalty=3.0, presence_penalty=1.0, logit_bias=((1, 2.0),)),
    )
    Sampler().sample(logits, [build_state(params) for params in settings])
    assert torch.equal(logits, before)


def test_an_empty_batch_brings_nothing() -> None:
    """A step of nothing but prompt chunks samples nothing."""
    assert Sampler().sample(torch.zeros((0, VOCAB_SIZE)), []) == []

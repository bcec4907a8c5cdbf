"""Answers of vLLM's engine API, message by message."""

from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto", reason="the package smg-grpc-proto has the messages of vLLM's engine API")

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.request import (
    FinishReason,
    GeneratedDelta,
    GenerationEnded,
    GenerationSpec,
    PromptComputed,
    StoppingParams,
)
from engine_service.sampling_params import SampledToken, TokenLogprob
from engine_service.vllm_answer import VllmAnswer

FIRST = SampledToken(7, -0.5, (TokenLogprob(7, -0.5), TokenLogprob(1, -1.5)))
SECOND = SampledToken(8, -2.0, (TokenLogprob(3, -0.25), TokenLogprob(8, -2.0)))


def build_answer(*, is_streamed: bool, **given: Any) -> VllmAnswer:
    """An answer to a prompt of three tokens."""
    return VllmAnswer(GenerationSpec("name", (4, 5, 6), **given), is_streamed=is_streamed)


def build_end(reason: FinishReason = FinishReason.LENGTH, **given: Any) -> GenerationEnded:
    """The end after two tokens."""
    return GenerationEnded(reason, num_prompt_tokens=3, num_completion_tokens=2, **given)


def parse(data: bytes | None) -> pb.GenerateResponse:
    """Reads a message that was built."""
    assert data is not None
    return pb.GenerateResponse.FromString(data)


def test_streamed_answer_comes_in_parts_and_ends_with_all_of_it() -> None:
    """Parts tell their own number of tokens, which the gateway adds up; the last message tells the sum."""
    answer = build_answer(is_streamed=True)
    chunk = parse(answer.build_delta([GeneratedDelta("x", (SampledToken(7),))], 0)).chunk
    assert chunk == pb.GenerateStreamChunk(token_ids=[7], prompt_tokens=3, completion_tokens=1)
    chunk = parse(answer.build_delta([GeneratedDelta("y", (SampledToken(8),))], 0)).chunk
    assert (list(chunk.token_ids), chunk.completion_tokens) == ([8], 1)
    complete = parse(answer.build_final(build_end(num_cached_tokens=2), 0)).complete
    assert complete == pb.GenerateComplete(
        output_ids=[7, 8], finish_reason="length", prompt_tokens=3, completion_tokens=2, cached_tokens=2
    )


def test_answer_that_is_not_streamed_comes_in_one_message() -> None:
    """Nothing before the end; then everything, log-probabilities included."""
    answer = build_answer(is_streamed=False, num_logprobs=2)
    assert answer.build_delta([GeneratedDelta("x", (FIRST,)), GeneratedDelta("y", (SECOND,))], 0) is None
    complete = parse(answer.build_final(build_end(), 0)).complete
    assert list(complete.output_ids) == [7, 8]
    assert complete.output_logprobs == pb.OutputLogProbs(
        token_logprobs=[-0.5, -2.0],
        token_ids=[7, 8],
        top_logprobs=[
            pb.TopLogProbs(values=[-0.5, -1.5], token_ids=[7, 1]),
            pb.TopLogProbs(values=[-0.25, -2.0], token_ids=[3, 8]),
        ],
    )


def test_streamed_log_probabilities_are_told_once() -> None:
    """With the part that has the token, not again at the end."""
    answer = build_answer(is_streamed=True, num_logprobs=0)
    chunk = parse(answer.build_delta([GeneratedDelta("x", (SampledToken(7, -0.5),))], 0)).chunk
    assert chunk.output_logprobs == pb.OutputLogProbs(token_logprobs=[-0.5], token_ids=[7])
    assert not parse(answer.build_final(build_end(), 0)).complete.HasField("output_logprobs")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_prompt_log_probabilities_come_with_each_samples_first_message(is_streamed: bool) -> None:
    """The prompt's first token has none; an engine tells of a prompt once, however many samples there are."""
    answer = build_answer(is_streamed=is_streamed, num_prompt_logprobs=2, num_samples=2)
    answer.build_prompt(PromptComputed((SampledToken(5, *FIRST[1:]), SampledToken(6, *SECOND[1:]))))
    expected = pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            pb.InputTokenLogProb(value=-0.5),
            pb.InputTokenLogProb(value=-2.0),
        ],
        token_ids=[4, 5, 6],
        top_logprobs=[
            pb.TopLogProbs(),
            pb.TopLogProbs(values=[-0.5, -1.5], token_ids=[7, 1]),
            pb.TopLogProbs(values=[-0.25, -2.0], token_ids=[3, 8]),
        ],
    )
    for sample in (0, 1):
        parts = [answer.build_delta([GeneratedDelta("x", (SampledToken(7),))], sample) for _ in range(2)]
        complete = parse(answer.build_final(build_end(), sample)).complete
        if is_streamed:
            first, second = (parse(part).chunk for part in parts)
            assert first.input_logprobs == expected
            assert not second.HasField("input_logprobs")
            assert not complete.HasField("input_logprobs")
        else:
            assert complete.input_logprobs == expected
        assert complete.index == sample


def test_samples_are_kept_apart() -> None:
    """Parts and ends carry the sample's number, and its tokens alone."""
    answer = build_answer(is_streamed=True, num_samples=2)
    for sample, token in ((1, 8), (0, 7), (1, 9)):
        chunk = parse(answer.build_delta([GeneratedDelta("", (SampledToken(token),))], sample)).chunk
        assert (chunk.index, list(chunk.token_ids)) == (sample, [token])
    assert list(parse(answer.build_final(build_end(), 1)).complete.output_ids) == [8, 9]
    assert list(parse(answer.build_final(build_end(), 0)).complete.output_ids) == [7]


@pytest.mark.parametrize(("reason", "name"), [(reason, reason.value) for reason in FinishReason])
def test_every_finish_reason_has_its_name(reason: FinishReason, name: str) -> None:
    """Those of the proto's comment: stop, length, abort."""
    answer = build_answer(is_streamed=False)
    assert parse(answer.build_final(build_end(reason), 0)).complete.finish_reason == name
    assert name in {"stop", "length", "abort"}


def test_what_stopped_an_answer_is_told_where_the_caller_asked_for_it() -> None:
    """Stop strings and stop tokens; the model's own end is no match, as in vLLM."""
    answer = build_answer(is_streamed=False, stopping=StoppingParams(stop=("END",), stop_token_ids=(8,)))
    ends = [
        build_end(FinishReason.STOP, matched_stop="END"),
        build_end(FinishReason.STOP, matched_token_id=8),
        build_end(FinishReason.STOP, matched_token_id=0),
    ]
    completes = [parse(answer.build_final(end, 0)).complete for end in ends]
    assert [one.WhichOneof("matched_stop") for one in completes] == ["matched_stop_str", "matched_token_id", None]
    assert (completes[0].matched_stop_str, completes[1].matched_token_id) == ("END", 8)

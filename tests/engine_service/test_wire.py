"""Rules of reading requests and building responses."""

import pytest
from google.protobuf.json_format import MessageToDict

from engine_service.errors import InvalidRequestError
from engine_service.request import FinishReason, GeneratedDelta, GenerationEnded, StoppingParams
from engine_service.sampling_params import SampledToken, SamplingParams, TokenLogprob
from engine_service.tokenizer import ChatMessage
from engine_service.wire import build_delta, build_final, read_generate_request, read_tokenize_request
from ringplan.inference.v1 import inference_pb2 as pb


def _read(message: pb.GenerateRequest) -> object:
    return read_generate_request(message.SerializeToString(), default_request_id="default")


def test_request_that_says_little_gets_the_defaults_of_the_parameters() -> None:
    """What is not given keeps its default, not the proto's zero: top_p is 1, the penalty is 1."""
    asked = read_generate_request(pb.GenerateRequest(text="hi").SerializeToString(), default_request_id="default")
    assert (asked.request_id, asked.prompt.field, asked.prompt.text) == ("default", "text", "hi")
    assert asked.sampling == SamplingParams()
    assert asked.stopping == StoppingParams()
    assert asked.num_logprobs is None
    assert asked.num_prompt_logprobs is None
    assert not asked.echoes_prompt


def test_every_parameter_arrives() -> None:
    """Each field of sampling and stopping reaches its parameter."""
    message = pb.GenerateRequest(
        request_id="mine",
        messages=[pb.ChatMessage(role="user", content="hello")],
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=0.75,
            frequency_penalty=-0.5,
            logit_bias={9: -100.0, 3: 2.5},
        ),
        stopping=pb.StoppingParams(max_tokens=7, stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=True, min_tokens=2),
        logprobs=0,
        prompt_logprobs=20,
        echo=True,
    )
    asked = read_generate_request(message.SerializeToString(), default_request_id="default")
    assert asked.request_id == "mine"
    assert asked.prompt.messages == (ChatMessage("user", "hello"),)
    assert asked.sampling == SamplingParams(
        0.5, 3, 0.25, 0.125, 2**64 - 1, 1.5, 0.75, -0.5, logit_bias=((3, 2.5), (9, -100.0))
    )
    assert asked.stopping == StoppingParams(7, ("a", "b"), (1, 2), ignore_eos=True, min_tokens=2)
    assert asked.num_logprobs == 0
    assert asked.num_prompt_logprobs == 20
    assert asked.echoes_prompt


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "text"),
        (pb.GenerateRequest(text="a", token_ids=pb.TokenIds(ids=[1])), "token_ids"),
        (pb.GenerateRequest(text="a", messages=[pb.ChatMessage(role="user")]), "messages"),
        (pb.GenerateRequest(messages=[pb.ChatMessage(content="a")]), "messages[0].role"),
        (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id"),
        # Refused for their number before any of them is looked at, let alone turned into tokens.
        (pb.GenerateRequest(text="a", guidance=[pb.GuidanceContext()] * 3), "guidance"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=-1)), "sampling.temperature"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=float("nan"))), "sampling.temperature"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=1.5)), "sampling.top_p"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=0)), "sampling.top_p"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_k=-1)), "sampling.top_k"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(min_p=2)), "sampling.min_p"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(repetition_penalty=0)), "sampling.repetition_penalty"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(presence_penalty=3)), "sampling.presence_penalty"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(frequency_penalty=-3)), "sampling.frequency_penalty"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias={1: 101})), "sampling.logit_bias"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(min_tokens=-1)), "stopping.min_tokens"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=0)), "stopping.max_tokens"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(stop=["x"] * 17)), "stopping.stop"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(stop_token_ids=[1] * 65)), "stopping.stop_token_ids"),
    ],
)
def test_bad_request_is_refused_with_its_field(message: pb.GenerateRequest, field: str) -> None:
    """Each broken rule names the field that breaks it."""
    with pytest.raises(InvalidRequestError) as caught:
        _read(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("good", "bad", "field"),
    [
        (pb.GenerateRequest(text="QQ"), b"\xff\xfe", "text"),
        (pb.GenerateRequest(request_id="QQ", text="a"), b"\xc3\x28", "request_id"),
        # A lone surrogate, which UTF-8 has no form for.
        (
            pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="QQQ")]),
            b"\xed\xa0\x80",
            "messages.content",
        ),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(stop=["ok", "QQ"])), b"\x80\x80", "stopping.stop"),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_its_field(good: pb.GenerateRequest, bad: bytes, field: str) -> None:
    """Protobuf refuses the whole message; the error still says which text is to blame."""
    data = good.SerializeToString().replace(b"Q" * len(bad), bad)
    with pytest.raises(InvalidRequestError, match="UTF-8") as caught:
        read_generate_request(data, default_request_id="default")
    assert caught.value.field == field


def test_tokenize_takes_text_or_messages() -> None:
    """Both forms arrive; neither and both are refused."""
    assert read_tokenize_request(pb.TokenizeRequest(text="").SerializeToString()).field == "text"
    message = pb.TokenizeRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    assert read_tokenize_request(message.SerializeToString()).messages == (ChatMessage("user", "hi"),)
    for bad in (pb.TokenizeRequest(), pb.TokenizeRequest(text="a", messages=[pb.ChatMessage(role="user")])):
        with pytest.raises(InvalidRequestError):
            read_tokenize_request(bad.SerializeToString())


def test_deltas_in_a_row_become_one_message() -> None:
    """Texts are joined; tokens and log-probabilities stay in order."""
    deltas = [
        GeneratedDelta("a", (SampledToken(1, -0.5, (TokenLogprob(1, -0.5), TokenLogprob(4, -1.0))),)),
        GeneratedDelta("", (SampledToken(2, -0.25),)),
    ]
    assert MessageToDict(build_delta(deltas), preserving_proto_field_name=True) == {
        "delta": {
            "text": "a",
            "token_ids": [1, 2],
            "logprobs": [
                {
                    "chosen": {"token_id": 1, "logprob": -0.5},
                    "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 4, "logprob": -1.0}],
                },
                {"chosen": {"token_id": 2, "logprob": -0.25}},
            ],
        }
    }


def test_end_says_only_what_matched() -> None:
    """A stop string or a stop token is there only if one came."""
    response = build_final(GenerationEnded(FinishReason.STOP, 3, 4, matched_token_id=0, num_cached_tokens=2))
    assert response.final.finish_reason == pb.FINISH_REASON_STOP
    assert response.final.HasField("matched_token_id")
    assert not response.final.HasField("matched_stop")
    usage = response.final.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_number(reason: FinishReason) -> None:
    """Ours and the proto's have the same names."""
    number = build_final(GenerationEnded(reason, 1, 1)).final.finish_reason
    assert pb.FinishReason.Name(number) == f"FINISH_REASON_{reason.name}"

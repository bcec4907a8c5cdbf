"""Requests of vLLM's engine API: what is mapped, what is refused by name, and that nothing is dropped."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto", reason="the package smg-grpc-proto has the messages of vLLM's engine API")

from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.errors import InvalidRequestError, RequestTooLargeError
from engine_service.request import StoppingParams
from engine_service.sampling_params import SamplingParams
from engine_service.vllm_wire import (
    REFUSED_FIELDS,
    REFUSED_SAMPLING_FIELDS,
    VllmInput,
    fields_renamed,
    read_abort_request,
    read_generate_request,
)
from engine_service.wire import Prompt

TOKENIZED = pb.TokenizedInput(original_text="ab", input_ids=[5, 6])
MAPPED_FIELDS = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
MAPPED_SAMPLING_FIELDS = {
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs"),
    *("seed", "logit_bias"),
}
# The caller makes the text; and the last one says when a constraint begins, which is refused anyway.
WITHOUT_EFFECT = {
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    "grammar_from_first_token",
}


def read(message: pb.GenerateRequest) -> VllmInput:
    """Reads a request as it comes."""
    return read_generate_request(message.SerializeToString(), default_request_id="default")


def build_value(field: FieldDescriptor) -> Any:
    """Returns some value of a field's type that is not its default."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return [{}] if field.is_repeated else {}
    return "{}" if field.type == FieldDescriptor.TYPE_STRING else 1


def test_every_field_is_mapped_or_refused_or_about_text() -> None:
    """A field that a later version of the proto brings fails this test until somebody decides what to do with it."""
    names = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert names == MAPPED_FIELDS | set(REFUSED_FIELDS)
    sampling_names = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert sampling_names == MAPPED_SAMPLING_FIELDS | set(REFUSED_SAMPLING_FIELDS) | WITHOUT_EFFECT


def test_documentation_names_every_field() -> None:
    """A reader of docs/gateway.md learns what becomes of each."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text()
    names = {*pb.GenerateRequest.DESCRIPTOR.fields_by_name, *pb.SamplingParams.DESCRIPTOR.fields_by_name}
    assert {name for name in names - {"sampling_params"} if f"`{name}`" not in page} == set()
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    assert {name for name in methods if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_what_the_engine_does_not_do_is_refused_by_name(name: str) -> None:
    """Also where the field is there and empty."""
    value = build_value(pb.GenerateRequest.DESCRIPTOR.fields_by_name[name])
    with pytest.raises(InvalidRequestError, match="is not supported") as caught:
        read(pb.GenerateRequest(tokenized=TOKENIZED, **{name: value}))
    assert caught.value.field == name


@pytest.mark.parametrize("name", REFUSED_SAMPLING_FIELDS)
def test_sampling_that_the_engine_does_not_do_is_refused_by_name(name: str) -> None:
    """No answer comes that looks as if a constraint had been honoured."""
    value = build_value(pb.SamplingParams.DESCRIPTOR.fields_by_name[name])
    with pytest.raises(InvalidRequestError, match="is not supported") as caught:
        read(pb.GenerateRequest(tokenized=TOKENIZED, sampling_params=pb.SamplingParams(**{name: value})))
    assert caught.value.field == f"sampling_params.{name}"


def test_everything_that_is_mapped_arrives() -> None:
    """Each field with a value of its own, exact in binary."""
    params = pb.SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=2,
        stop=["x", "yy"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        n=3,
        logprobs=2,
        prompt_logprobs=1,
        seed=11,
        logit_bias={8: -1.5, 2: 4.0},
    )
    message = pb.GenerateRequest(
        request_id="mine", tokenized=TOKENIZED, sampling_params=params, stream=True, data_parallel_rank=0
    )
    asked, is_streamed = read(message)
    assert is_streamed
    assert (asked.request_id, asked.prompt.field, list(asked.prompt.token_ids)) == ("mine", "token_ids", [5, 6])
    assert asked.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.125,
        seed=11,
        repetition_penalty=1.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias=((2, 4.0), (8, -1.5)),
    )
    assert asked.stopping == StoppingParams(9, ("x", "yy"), (3, 4), ignore_eos=True, min_tokens=2)
    assert (asked.num_samples, asked.num_logprobs, asked.num_prompt_logprobs) == (3, 2, 1)


def test_what_is_left_out_is_as_in_vllm() -> None:
    """Temperature 1, every token a candidate, one sample, no log-probabilities, our own default length and name."""
    asked, is_streamed = read(pb.GenerateRequest(text="hello"))
    assert not is_streamed
    assert (asked.request_id, asked.prompt) == ("default", Prompt("text", text="hello"))
    assert asked.sampling == SamplingParams(temperature=1.0)
    assert asked.stopping == StoppingParams()
    assert (asked.num_samples, asked.num_logprobs, asked.num_prompt_logprobs) == (1, None, None)


def test_temperature_zero_is_greedy() -> None:
    """The field has presence: a zero is a zero, not the default."""
    asked, _ = read(pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=0.0)))
    assert asked.sampling.is_greedy


def test_zero_log_probabilities_are_those_of_the_tokens_alone() -> None:
    """Zero alternatives are something else than no log-probabilities."""
    asked, _ = read(pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(logprobs=0)))
    assert asked.num_logprobs == 0


@pytest.mark.parametrize(
    ("message", "field", "rule"),
    [
        (pb.GenerateRequest(), "tokenized", "one of tokenized and text is required"),
        (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id", "129"),
        (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank", "1 is not 0"),
        (pb.GenerateRequest(text="a", data_parallel_rank=-1), "data_parallel_rank", "-1 is not 0"),
        (pb.GenerateRequest(text="a", sampling_params={"top_p": 1.5}), "sampling_params.top_p", "1.5"),
        (pb.GenerateRequest(text="a", sampling_params={"top_k": 1 << 31}), "sampling_params.top_k", str(1 << 31)),
        (pb.GenerateRequest(text="a", sampling_params={"seed": -1}), "sampling_params.seed", "-1"),
        (pb.GenerateRequest(text="a", sampling_params={"max_tokens": 0}), "sampling_params.max_tokens", "0"),
        (pb.GenerateRequest(text="a", sampling_params={"stop": [""]}), "sampling_params.stop", "0 characters"),
        (
            pb.GenerateRequest(text="a", sampling_params={"logit_bias": dict.fromkeys(range(1_025), 1.0)}),
            "sampling_params.logit_bias",
            "1025",
        ),
    ],
)
def test_bad_input_names_the_field_of_this_api(message: pb.GenerateRequest, field: str, rule: str) -> None:
    """The engine's own rules hold; their errors say what the caller wrote."""
    with pytest.raises(InvalidRequestError) as caught:
        read(message)
    assert caught.value.field == field
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ("token_ids", "tokenized.input_ids"),
        ("text", "text"),
        ("n", "sampling_params.n"),
        ("logprobs", "sampling_params.logprobs"),
        ("stopping.min_tokens", "sampling_params.min_tokens"),
    ],
)
def test_later_errors_are_renamed_too(own: str, theirs: str) -> None:
    """Those that the engine raises once it has the tokens; figures and rules stay."""
    with pytest.raises(InvalidRequestError) as caught, fields_renamed():
        raise InvalidRequestError(own, "is wrong")
    assert (caught.value.field, caught.value.rule) == (theirs, "is wrong")
    with pytest.raises(RequestTooLargeError) as too_large, fields_renamed():
        raise RequestTooLargeError(own, 7, 3)
    assert (too_large.value.field, too_large.value.num_pages_needed, too_large.value.num_pages_usable) == (theirs, 7, 3)


def test_bytes_that_are_no_message_are_refused() -> None:
    """Both kinds of request that are read."""
    for reader in (lambda data: read_generate_request(data, "default"), read_abort_request):
        with pytest.raises(InvalidRequestError):
            reader(b"\xff")


def test_abort_names_requests() -> None:
    """In order, each as it was given."""
    assert read_abort_request(pb.AbortRequest(request_ids=["a", "b"]).SerializeToString()) == ["a", "b"]

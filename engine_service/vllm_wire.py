"""Requests of vLLM's engine API to plain values; knows protobuf, but no gRPC.

Every field of a request is mapped, or refused by name, or shapes only the text, which this API leaves to its caller.

Source:
    `vllm_engine.proto` of the package `smg-grpc-proto`, and what the package `smg-grpc-servicer` makes of it for vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.errors import InvalidRequestError, RequestTooLargeError
from engine_service.parsing import parse
from engine_service.request import StoppingParams
from engine_service.sampling_params import SamplingParams, check_num_biases
from engine_service.wire import MAX_REQUEST_ID_CHARACTERS, GenerateInput, Prompt

# vLLM's own default, where ours is greedy.
DEFAULT_TEMPERATURE = 1.0

# What is refused, and why.
REFUSED_FIELDS = {
    "kv_transfer_params": "one engine does prefill and decode",
    "kv_transfer_params_json": "one engine does prefill and decode",
    "mm_inputs": "the engine takes text alone",
    "extra_mm_inputs": "the engine takes text alone",
    "media_refs": "the engine takes text alone",
}
REFUSED_SAMPLING_FIELDS = {
    "json_schema": "the engine does not constrain its output",
    "json_object": "the engine does not constrain its output",
    "regex": "the engine does not constrain its output",
    "grammar": "the engine does not constrain its output",
    "structural_tag": "the engine does not constrain its output",
    "choice": "the engine does not constrain its output",
    "truncate_prompt_tokens": "the engine does not shorten prompts",
}

_NAME_BY_OWN_NAME = {
    "token_ids": "tokenized.input_ids",
    "n": "sampling_params.n",
    "logprobs": "sampling_params.logprobs",
    "prompt_logprobs": "sampling_params.prompt_logprobs",
}


class VllmInput(NamedTuple):
    """What a GenerateRequest asks for.

    Args:
        asked: the request in the engine's own terms.
        is_streamed: whether the answer is to come in parts.
    """

    asked: GenerateInput
    is_streamed: bool


@contextmanager
def fields_renamed() -> Iterator[None]:
    """Gives the errors of a `with` block the field names of this API.

    Raises:
        InvalidRequestError: one was raised within.
    """
    try:
        yield
    except RequestTooLargeError as error:
        raise RequestTooLargeError(_rename(error.field), error.num_pages_needed, error.num_pages_usable) from error
    except InvalidRequestError as error:
        raise InvalidRequestError(_rename(error.field), error.rule) from error


def read_generate_request(data: bytes, default_request_id: str) -> VllmInput:
    """Reads a GenerateRequest.

    Args:
        data: its bytes.
        default_request_id: the name of a request that brings none.

    Raises:
        InvalidRequestError: a rule is broken, or the engine does not do what is asked for.
    """
    message = parse(pb.GenerateRequest, data)
    if len(message.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            "request_id", f"{len(message.request_id)} characters are more than {MAX_REQUEST_ID_CHARACTERS}"
        )
    params = message.sampling_params
    _refuse(message, REFUSED_FIELDS, "")
    _refuse(params, REFUSED_SAMPLING_FIELDS, "sampling_params.")
    if message.data_parallel_rank:
        raise InvalidRequestError("data_parallel_rank", f"{message.data_parallel_rank} is not 0: there is one rank")
    with fields_renamed():
        asked = GenerateInput(
            request_id=message.request_id or default_request_id,
            prompt=_read_prompt(message),
            sampling=_read_sampling(params),
            stopping=_read_stopping(params),
            num_logprobs=params.logprobs if params.HasField("logprobs") else None,
            num_prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
            num_samples=params.n or 1,
        )
    return VllmInput(asked, message.stream)


def read_abort_request(data: bytes) -> list[str]:
    """Reads an AbortRequest; returns the names of the requests to end.

    Raises:
        InvalidRequestError: the bytes are no such message.
    """
    return list(parse(pb.AbortRequest, data).request_ids)


def _refuse(message: pb.GenerateRequest | pb.SamplingParams, refused: dict[str, str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name in refused:
            raise InvalidRequestError(path + field.name, f"is not supported: {refused[field.name]}")


def _read_prompt(message: pb.GenerateRequest) -> Prompt:
    form = message.WhichOneof("input")
    if form is None:
        raise InvalidRequestError("tokenized", "one of tokenized and text is required")
    if form == "text":
        return Prompt("text", text=message.text)
    return Prompt("token_ids", token_ids=message.tokenized.input_ids)


def _read_sampling(params: pb.SamplingParams) -> SamplingParams:
    check_num_biases(len(params.logit_bias))
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else DEFAULT_TEMPERATURE,
        top_k=params.top_k,
        # Without presence, a zero says that nothing was asked for.
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else None,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )


def _read_stopping(params: pb.SamplingParams) -> StoppingParams:
    return StoppingParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def _rename(field: str) -> str:
    for section in ("sampling.", "stopping."):
        if field.startswith(section):
            return "sampling_params." + field.removeprefix(section)
    return _NAME_BY_OWN_NAME.get(field, field)

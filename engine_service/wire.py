"""Protos to plain values and back; knows protobuf, but no gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.errors import InvalidRequestError
from engine_service.generation_spec import GenerationSpec, GuidanceContext, check_num_contexts
from engine_service.parsing import parse
from engine_service.request import (
    ChatMessage,
    FinishReason,
    GeneratedDelta,
    GenerationEnded,
    PromptComputed,
    StoppingParams,
)
from engine_service.sampling_params import SampledToken, SamplingParams, check_num_biases
from ringplan.inference.v1 import inference_pb2 as pb

MAX_REQUEST_ID_CHARACTERS = 128
MAX_ROLE_CHARACTERS = 64

_NUMBER_BY_FINISH_REASON: dict[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it came, exactly one of its forms given.

    Args:
        field: which one: "text", "messages" or "token_ids".
        path: the path of the message that has it, with a dot at its end; empty for the request itself.
    """

    field: str
    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
    # As protobuf has them: copying those of a message that is far too long would hold up everybody.
    token_ids: Sequence[int] = ()
    path: str = ""

    @property
    def full_field(self) -> str:
        """Its name, as errors give it."""
        return self.path + self.field

    @property
    def num_characters(self) -> int:
        """The length of its text, or of its messages together."""
        return len(self.text) + sum(len(message.role) + len(message.content) for message in self.messages)


@dataclass(frozen=True, slots=True)
class ContextInput:
    """A further context of a guided request, not yet turned into tokens."""

    prompt: Prompt
    scale: float


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """What a GenerateRequest asks for, its prompt not yet turned into tokens."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stopping: StoppingParams
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    echoes_prompt: bool = False
    guidance: tuple[ContextInput, ...] = ()
    num_samples: int = 1

    def build_spec(self, token_ids: Sequence[int], contexts: Sequence[GuidanceContext] = ()) -> GenerationSpec:
        """Returns what the engine is to do, now that the prompt and its further contexts are tokens.

        Raises:
            InvalidRequestError: a rule is broken.
        """
        return GenerationSpec(
            request_id=self.request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=self.sampling,
            stopping=self.stopping,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            echoes_prompt=self.echoes_prompt,
            guidance=tuple(contexts),
            num_samples=self.num_samples,
        )


def read_generate_request(data: bytes, default_request_id: str) -> GenerateInput:
    """Reads a GenerateRequest.

    Args:
        data: its bytes.
        default_request_id: the name of a request that brings none.

    Raises:
        InvalidRequestError: a rule is broken.
    """
    message = parse(pb.GenerateRequest, data)
    if len(message.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            "request_id", f"{len(message.request_id)} characters are more than {MAX_REQUEST_ID_CHARACTERS}"
        )
    # Before they are turned into tokens, one by one.
    check_num_contexts(len(message.guidance))
    return GenerateInput(
        request_id=message.request_id or default_request_id,
        prompt=_read_prompt(message, ""),
        sampling=_read_sampling(message.sampling),
        stopping=_read_stopping(message.stopping),
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        echoes_prompt=message.echo,
        guidance=tuple([_read_context(context, number) for number, context in enumerate(message.guidance)]),
        num_samples=message.n if message.HasField("n") else 1,
    )


def read_tokenize_request(data: bytes) -> Prompt:
    """Reads a TokenizeRequest.

    Args:
        data: its bytes.

    Raises:
        InvalidRequestError: a rule is broken.
    """
    message = parse(pb.TokenizeRequest, data)
    if message.HasField("text") == bool(message.messages):
        raise InvalidRequestError("text", "exactly one of text and messages is required")
    field = "text" if message.HasField("text") else "messages"
    return Prompt(field, text=message.text, messages=_read_messages(message.messages, ""))


def build_prompt(text: str, token_ids: Sequence[int], computed: PromptComputed) -> pb.GenerateResponse:
    """Returns the response that tells of the prompt.

    Args:
        text: its text, if that is to be told.
        token_ids: its tokens.
        computed: what is known of them.
    """
    return pb.GenerateResponse(
        prompt=pb.GeneratePrompt(text=text, token_ids=token_ids, logprobs=_build_all_logprobs(computed.logprobs))
    )


def build_delta(deltas: Sequence[GeneratedDelta], sample: int = 0) -> pb.GenerateResponse:
    """Returns the response that tells of one or more deltas in a row."""
    tokens = [token for delta in deltas for token in delta.tokens]
    return pb.GenerateResponse(
        delta=pb.GenerateDelta(
            text="".join([delta.text for delta in deltas]),
            token_ids=[token.token_id for token in tokens],
            logprobs=_build_all_logprobs(tokens),
        ),
        sample=sample,
    )


def build_final(ended: GenerationEnded, sample: int = 0) -> pb.GenerateResponse:
    """Returns the response that tells how a request ended."""
    return pb.GenerateResponse(
        final=pb.GenerateFinal(
            finish_reason=_NUMBER_BY_FINISH_REASON[ended.finish_reason],
            matched_stop=ended.matched_stop,
            matched_token_id=ended.matched_token_id,
            usage=pb.Usage(
                prompt_tokens=ended.num_prompt_tokens,
                completion_tokens=ended.num_completion_tokens,
                cached_tokens=ended.num_cached_tokens,
            ),
        ),
        sample=sample,
    )


def _read_prompt(message: pb.GenerateRequest | pb.GuidanceContext, path: str) -> Prompt:
    forms = [
        *(["text"] if message.HasField("text") else []),
        *(["messages"] if message.messages else []),
        *(["token_ids"] if message.HasField("token_ids") else []),
    ]
    if len(forms) != 1:
        given = " and ".join(forms) or "none"
        raise InvalidRequestError(
            path + (forms[-1] if forms else "text"),
            f"exactly one of text, messages and token_ids is required; given: {given}",
        )
    return Prompt(
        forms[0],
        text=message.text,
        messages=_read_messages(message.messages, path),
        token_ids=message.token_ids.ids,
        path=path,
    )


def _read_context(message: pb.GuidanceContext, number: int) -> ContextInput:
    path = f"guidance[{number}]."
    if not message.HasField("scale"):
        raise InvalidRequestError(f"{path}scale", "is required")
    return ContextInput(_read_prompt(message, path), message.scale)


def _read_messages(messages: Sequence[pb.ChatMessage], path: str) -> tuple[ChatMessage, ...]:
    for number, message in enumerate(messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
            raise InvalidRequestError(
                f"{path}messages[{number}].role", f"{len(message.role)} characters are outside 1..{MAX_ROLE_CHARACTERS}"
            )
    return tuple([ChatMessage(message.role, message.content) for message in messages])


def _read_sampling(message: pb.SamplingParams) -> SamplingParams:
    # A field that is not given keeps the default of SamplingParams, whatever the proto's zero value is.
    check_num_biases(len(message.logit_bias))
    values = {field.name: value for field, value in message.ListFields()}
    return SamplingParams(**{**values, "logit_bias": tuple(sorted(message.logit_bias.items()))})


def _read_stopping(message: pb.StoppingParams) -> StoppingParams:
    return StoppingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
    )


def _build_all_logprobs(tokens: Sequence[SampledToken]) -> list[pb.PositionLogprobs]:
    return [_build_logprobs(token, token.logprob) for token in tokens if token.logprob is not None]


def _build_logprobs(token: SampledToken, logprob: float) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=token.token_id, logprob=logprob),
        top=[pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top_logprobs],
    )

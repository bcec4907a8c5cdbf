"""The engine over gRPC: the only module of it that handles calls, and that knows status codes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar
from uuid import uuid4

import grpc

from engine_service.engine import Engine
from engine_service.errors import (
    EngineError,
    EngineStoppingError,
    InvalidRequestError,
    ListenError,
    ModelError,
    QueueFullError,
    RequestTooLargeError,
    StepFailedError,
)
from engine_service.request import (
    GeneratedDelta,
    GenerationEvent,
    GenerationFailed,
    GenerationSpec,
    GuidanceContext,
    PromptComputed,
)
from engine_service.validation import check_num_characters, check_token_ids, count_tokens_left
from engine_service.wire import (
    GenerateInput,
    Prompt,
    build_delta,
    build_final,
    build_prompt,
    parse,
    read_generate_request,
    read_tokenize_request,
)
from ringplan.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    # It brings transformers, which takes seconds to import; the server listens before.
    from engine_service.tokenizer import Tokenizer

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# The trailing metadata that says why a call failed, in words that a program can rely on.
REASON_KEY = "ringplan-reason"
FIELD_KEY = "ringplan-field"
INTERNAL_REASON = "INTERNAL"
# A status message travels in headers, most of which are limited to 8 KiB, with three bytes for one that is not ASCII.
MAX_DETAILS_BYTES = 2_000
# Tokens that Detokenize takes, or as many as the model's context has if that is more.
MAX_DETOKENIZED_TOKENS = 1 << 18
# Messages up to here are read in the event loop, in milliseconds.
MAX_BYTES_READ_AT_ONCE = 1 << 16

_Status = grpc.StatusCode
# A class that is not listed is treated as its nearest base that is.
STATUS_BY_ERROR: dict[type[EngineError], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (_Status.INVALID_ARGUMENT, "INVALID_REQUEST"),
    RequestTooLargeError: (_Status.INVALID_ARGUMENT, "REQUEST_TOO_LARGE"),
    QueueFullError: (_Status.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    EngineStoppingError: (_Status.UNAVAILABLE, "SHUTTING_DOWN"),
    StepFailedError: (_Status.INTERNAL, "STEP_FAILED"),
    ListenError: (_Status.UNAVAILABLE, "CANNOT_LISTEN"),
    ModelError: (_Status.FAILED_PRECONDITION, "MODEL"),
    EngineError: (_Status.INTERNAL, INTERNAL_REASON),
}

ResultT = TypeVar("ResultT")
_Context = grpc.aio.ServicerContext[bytes, bytes]
# Numbers of samples, and what happened to them.
_SampleEvents = asyncio.Queue[tuple[int, GenerationEvent]]
_logger = logging.getLogger(__name__)


def find_status(error: EngineError) -> tuple[grpc.StatusCode, str]:
    """Returns the status code and the machine-readable reason of an error."""
    return next(STATUS_BY_ERROR[base] for base in type(error).__mro__ if base in STATUS_BY_ERROR)


class InferenceServicer:
    """Serves `InferenceService`. Messages come and go as bytes, so that one that cannot be read gets a proper answer.

    Args:
        engine: runs the requests; it delivers events in the event loop's thread.
        tokenizer: the model's.
        model_info: the answer to GetModelInfo.
    """

    def __init__(self, engine: Engine, tokenizer: "Tokenizer", model_info: pb.GetModelInfoResponse) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_info = model_info.SerializeToString()

    def build_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns what a server needs to serve this."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(self.get_model_info),
                "Tokenize": grpc.unary_unary_rpc_method_handler(self.tokenize),
                "Detokenize": grpc.unary_unary_rpc_method_handler(self.detokenize),
            },
        )

    async def generate(self, data: bytes, context: _Context) -> None:
        """Streams the answer to one prompt. A call that ends early, for whatever reason, aborts the request."""
        await _answer(context, self._generate(data, context))

    async def get_model_info(self, data: bytes, context: _Context) -> bytes:
        """Tells which model is loaded."""

        async def answer() -> bytes:
            parse(pb.GetModelInfoRequest, data)
            return self._model_info

        return await _answer(context, answer())

    async def tokenize(self, data: bytes, context: _Context) -> bytes:
        """Turns text or chat messages into token ids."""

        async def answer() -> bytes:
            token_ids = await self._encode(await _read(read_tokenize_request, data))
            return pb.TokenizeResponse(token_ids=token_ids).SerializeToString()

        return await _answer(context, answer())

    async def detokenize(self, data: bytes, context: _Context) -> bytes:
        """Turns token ids into text."""

        async def answer() -> bytes:
            request = parse(pb.DetokenizeRequest, data)
            self._check_num_detokenized(len(request.token_ids))
            check_token_ids(request.token_ids, self._engine.limits, "token_ids")
            text = await asyncio.to_thread(
                self._tokenizer.decode, list(request.token_ids), skip_special_tokens=request.skip_special_tokens
            )
            return pb.DetokenizeResponse(text=text).SerializeToString()

        return await _answer(context, answer())

    async def _generate(self, data: bytes, context: _Context) -> None:
        asked = await _read(partial(read_generate_request, default_request_id=uuid4().hex[:16]), data)
        contexts = [
            GuidanceContext(tuple(await self._encode(context.prompt)), context.scale) for context in asked.guidance
        ]
        spec = _build_spec(asked, await self._encode(asked.prompt), contexts)
        events: _SampleEvents = asyncio.Queue()
        text = await self._read_text(asked.prompt, spec) if spec.echoes_prompt else ""
        requests = self._engine.submit_samples(
            spec,
            lambda sample, event: events.put_nowait((sample, event)),
            prompt_field=asked.prompt.field,
            context_fields=[context.prompt.full_field for context in asked.guidance],
        )
        num_samples_left = len(requests)
        try:
            while num_samples_left:
                num_samples_left -= await _write_events(context, events, spec, text)
        finally:
            if num_samples_left:
                for request in requests:
                    self._engine.abort(request)

    async def _read_text(self, prompt: Prompt, spec: GenerationSpec) -> str:
        """Returns the prompt's text: as it came, or that of its tokens."""
        if prompt.field == "text":
            return prompt.text
        check_token_ids(spec.prompt_token_ids, self._engine.limits, prompt.field)
        return await asyncio.to_thread(self._tokenizer.decode, spec.prompt_token_ids)

    async def _encode(self, prompt: Prompt) -> list[int]:
        """Returns the prompt's tokens; a long text must not hold up the other calls."""
        limits = self._engine.limits
        check_num_characters(
            prompt.num_characters, self._tokenizer.max_token_characters, limits, field=prompt.full_field
        )
        if prompt.field == "token_ids":
            count_tokens_left(len(prompt.token_ids), limits, prompt.full_field, "context" if prompt.path else "prompt")
            return list(prompt.token_ids)
        if prompt.field == "messages":
            return await asyncio.to_thread(self._tokenizer.encode_chat, prompt.messages, field=prompt.full_field)
        if not prompt.text:
            raise InvalidRequestError(prompt.full_field, "the prompt is empty")
        return await asyncio.to_thread(self._tokenizer.encode, prompt.text, field=prompt.full_field)

    def _check_num_detokenized(self, num_tokens: int) -> None:
        max_tokens = max(MAX_DETOKENIZED_TOKENS, self._engine.limits.max_context_tokens)
        if num_tokens > max_tokens:
            raise InvalidRequestError("token_ids", f"{num_tokens} tokens are more than {max_tokens}")


async def _read(read: Callable[[bytes], ResultT], data: bytes) -> ResultT:
    """Reads a message; one with millions of parts must not hold up the other calls."""
    if len(data) <= MAX_BYTES_READ_AT_ONCE:
        return read(data)
    return await asyncio.to_thread(read, data)


def _build_spec(asked: GenerateInput, token_ids: list[int], contexts: Sequence[GuidanceContext]) -> GenerationSpec:
    return GenerationSpec(
        request_id=asked.request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=asked.sampling,
        stopping=asked.stopping,
        num_logprobs=asked.num_logprobs,
        num_prompt_logprobs=asked.num_prompt_logprobs,
        echoes_prompt=asked.echoes_prompt,
        guidance=tuple(contexts),
        num_samples=asked.num_samples,
    )


async def _write_events(context: _Context, events: _SampleEvents, spec: GenerationSpec, text: str) -> int:
    """Waits for events and writes them, deltas of a sample in a row as one message.

    Args:
        context: the call.
        events: the events.
        spec: the request.
        text: its prompt's text, if that is to be told.

    Returns:
        How many samples have ended.

    Raises:
        EngineError: a sample failed.
    """
    arrived = [await events.get()]
    while not events.empty():
        arrived.append(events.get_nowait())
    deltas: dict[int, list[GeneratedDelta]] = {}
    num_ended = 0
    for sample, event in arrived:
        if isinstance(event, PromptComputed):
            await context.write(build_prompt(text, spec.prompt_token_ids, event).SerializeToString())
        elif isinstance(event, GeneratedDelta):
            deltas.setdefault(sample, []).append(event)
        else:
            if sample in deltas:
                await context.write(build_delta(deltas.pop(sample), sample).SerializeToString())
            if isinstance(event, GenerationFailed):
                raise event.error
            await context.write(build_final(event, sample).SerializeToString())
            num_ended += 1
    for sample, news in deltas.items():
        await context.write(build_delta(news, sample).SerializeToString())
    return num_ended


async def _answer(context: _Context, answer: Awaitable[ResultT]) -> ResultT:
    """Awaits an answer; an error becomes the call's status."""
    try:
        return await answer
    except EngineError as error:
        await _abort(context, error)
    except Exception as error:
        _logger.exception("a call failed within the engine")
        metadata = ((REASON_KEY, INTERNAL_REASON),)
        details = _shorten(f"within the engine: {error!r}")
        await context.abort(grpc.StatusCode.INTERNAL, details, trailing_metadata=metadata)


async def _abort(context: _Context, error: EngineError) -> NoReturn:
    code, reason = find_status(error)
    metadata = [(REASON_KEY, reason)]
    if isinstance(error, InvalidRequestError):
        metadata.append((FIELD_KEY, error.field))
    await context.abort(code, _shorten(str(error)), trailing_metadata=tuple(metadata))


def _shorten(details: str) -> str:
    return details.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")

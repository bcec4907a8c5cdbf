"""The engine over gRPC: `ringplan.inference.v1.InferenceService`."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import grpc

from engine_service.calls import (
    CallContext,
    SampleEvents,
    answer_call,
    build_request_id,
    read_message,
    write_answer,
)
from engine_service.engine import Engine
from engine_service.errors import InvalidRequestError
from engine_service.parsing import parse
from engine_service.prompts import encode_prompt
from engine_service.request import (
    GeneratedDelta,
    GenerationEnded,
    GenerationSpec,
    GuidanceContext,
    PromptComputed,
)
from engine_service.validation import check_token_ids
from engine_service.wire import (
    Prompt,
    build_delta,
    build_final,
    build_prompt,
    read_generate_request,
    read_tokenize_request,
)
from ringplan.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    # It brings transformers, which takes seconds to import; the server listens before.
    from engine_service.tokenizer import Tokenizer

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# Tokens that Detokenize takes, or as many as the model's context has if that is more.
MAX_DETOKENIZED_TOKENS = 1 << 18


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

    async def generate(self, data: bytes, context: CallContext) -> None:
        """Streams the answer to one prompt. A call that ends early, for whatever reason, aborts the request."""
        await answer_call(context, self._generate(data, context))

    async def get_model_info(self, data: bytes, context: CallContext) -> bytes:
        """Tells which model is loaded."""

        async def answer() -> bytes:
            parse(pb.GetModelInfoRequest, data)
            return self._model_info

        return await answer_call(context, answer())

    async def tokenize(self, data: bytes, context: CallContext) -> bytes:
        """Turns text or chat messages into token ids."""

        async def answer() -> bytes:
            prompt = await read_message(read_tokenize_request, data)
            token_ids = await self._encode(prompt)
            return pb.TokenizeResponse(token_ids=token_ids).SerializeToString()

        return await answer_call(context, answer())

    async def detokenize(self, data: bytes, context: CallContext) -> bytes:
        """Turns token ids into text."""

        async def answer() -> bytes:
            request = parse(pb.DetokenizeRequest, data)
            self._check_num_detokenized(len(request.token_ids))
            check_token_ids(request.token_ids, self._engine.limits, "token_ids")
            text = await asyncio.to_thread(
                self._tokenizer.decode, list(request.token_ids), skip_special_tokens=request.skip_special_tokens
            )
            return pb.DetokenizeResponse(text=text).SerializeToString()

        return await answer_call(context, answer())

    async def _generate(self, data: bytes, context: CallContext) -> None:
        asked = await read_message(partial(read_generate_request, default_request_id=build_request_id()), data)
        contexts = [
            GuidanceContext(tuple(await self._encode(context.prompt)), context.scale) for context in asked.guidance
        ]
        spec = asked.build_spec(await self._encode(asked.prompt), contexts)
        events = SampleEvents()
        text = await self._read_text(asked.prompt, spec) if spec.echoes_prompt else ""
        requests = self._engine.submit_samples(
            spec,
            lambda sample, event: events.put_nowait((sample, event)),
            prompt_field=asked.prompt.field,
            context_fields=[context.prompt.full_field for context in asked.guidance],
        )
        await write_answer(context, self._engine, requests, events, _Messages(text, spec.prompt_token_ids))

    async def _encode(self, prompt: Prompt) -> list[int]:
        return await encode_prompt(prompt, self._tokenizer, self._engine.limits)

    async def _read_text(self, prompt: Prompt, spec: GenerationSpec) -> str:
        """Returns the prompt's text: as it came, or that of its tokens."""
        if prompt.field == "text":
            return prompt.text
        check_token_ids(spec.prompt_token_ids, self._engine.limits, prompt.field)
        return await asyncio.to_thread(self._tokenizer.decode, spec.prompt_token_ids)

    def _check_num_detokenized(self, num_tokens: int) -> None:
        max_tokens = max(MAX_DETOKENIZED_TOKENS, self._engine.limits.max_context_tokens)
        if num_tokens > max_tokens:
            raise InvalidRequestError("token_ids", f"{num_tokens} tokens are more than {max_tokens}")


class _Messages:
    """Answers of `InferenceService`."""

    def __init__(self, text: str, token_ids: Sequence[int]) -> None:
        self._text = text
        self._token_ids = token_ids

    def build_prompt(self, computed: PromptComputed) -> bytes:
        return build_prompt(self._text, self._token_ids, computed).SerializeToString()

    def build_delta(self, deltas: Sequence[GeneratedDelta], sample: int) -> bytes:
        return build_delta(deltas, sample).SerializeToString()

    def build_final(self, ended: GenerationEnded, sample: int) -> bytes:
        return build_final(ended, sample).SerializeToString()

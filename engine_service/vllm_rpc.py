"""vLLM's engine API over gRPC, `vllm.grpc.engine.VllmEngine`, as the SMG gateway calls it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.calls import (
    CallContext,
    SampleEvents,
    answer_call,
    build_request_id,
    read_message,
    write_answer,
)
from engine_service.engine import Engine
from engine_service.parsing import parse
from engine_service.prompts import encode_prompt
from engine_service.request import Request
from engine_service.tokenizer_archive import TokenizerArchive
from engine_service.vllm_answer import VllmAnswer
from engine_service.vllm_wire import fields_renamed, read_abort_request, read_generate_request

if TYPE_CHECKING:
    # It brings transformers, which takes seconds to import; the server listens before.
    from engine_service.tokenizer import Tokenizer

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
# What GetServerInfo calls a server of this API.
SERVER_TYPE = "vllm-grpc"
ARCHIVE_PART_BYTES = 1 << 16

# Methods that this engine has nothing for, and why.
UNIMPLEMENTED = {
    "Embed": "the engine makes no embeddings",
    "StartProfile": "the engine has no profiler",
    "StopProfile": "the engine has no profiler",
    "SubscribeKvEvents": "the engine tells of no KV cache events; GetLoads tells its load",
}


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What the information methods tell.

    Args:
        model_info: the answer to GetModelInfo.
        server_info: the answer to GetServerInfo, but for what changes.
        version: ours.
        max_running_requests: requests that may run at once.
    """

    model_info: pb.GetModelInfoResponse
    server_info: pb.GetServerInfoResponse
    version: str
    max_running_requests: int


class VllmServicer:
    """Serves `VllmEngine`. Messages come and go as bytes, as in `InferenceServicer`.

    Args:
        engine: runs the requests; it delivers events in the event loop's thread.
        tokenizer: the model's.
        archive: what GetTokenizer sends.
        facts: what the information methods tell.
        is_ready: tells whether the engine takes requests; called in the event loop's thread.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer",
        archive: TokenizerArchive,
        facts: VllmFacts,
        is_ready: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._archive = archive
        self._facts = facts
        self._is_ready = is_ready
        # By the name that the caller gave; nothing keeps two calls from giving the same.
        self._requests: dict[str, list[Request]] = {}
        self._started_at = time.monotonic()
        self._last_received_at = 0.0

    def build_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns what a server needs to serve this."""
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": stream(self.generate),
                "Abort": unary(self.abort),
                "HealthCheck": unary(partial(self._tell, pb.HealthCheckRequest, self._build_health)),
                "GetModelInfo": unary(partial(self._tell, pb.GetModelInfoRequest, self._get_model_info)),
                "GetServerInfo": unary(partial(self._tell, pb.GetServerInfoRequest, self._build_server_info)),
                "GetLoads": unary(partial(self._tell, pb.GetLoadsRequest, self._build_loads)),
                "GetTokenizer": stream(self.get_tokenizer),
                "FlushCache": unary(partial(self._tell, common_pb2.FlushCacheRequest, _build_flushed)),
                **{name: unary(partial(_refuse, why)) for name, why in UNIMPLEMENTED.items()},
            },
        )

    async def generate(self, data: bytes, context: CallContext) -> None:
        """Streams the answer to one prompt. A call that ends early, for whatever reason, aborts the request."""
        await answer_call(context, self._generate(data, context))

    async def abort(self, data: bytes, context: CallContext) -> bytes:
        """Ends requests by the names that their callers gave; a name that is not known is left alone."""

        async def answer() -> bytes:
            for request_id in await read_message(read_abort_request, data):
                for request in self._requests.get(request_id, ()):
                    self._engine.abort(request)
            return pb.AbortResponse().SerializeToString()

        return await answer_call(context, answer())

    async def get_tokenizer(self, data: bytes, context: CallContext) -> None:
        """Streams the tokenizer's files as a zip archive; the last part has the archive's SHA-256."""

        async def answer() -> None:
            parse(common_pb2.GetTokenizerRequest, data)
            archive = await asyncio.to_thread(self._archive.get)
            starts = range(0, len(archive.data), ARCHIVE_PART_BYTES)
            for start in starts:
                part = archive.data[start : start + ARCHIVE_PART_BYTES]
                sha256 = archive.sha256 if start == starts[-1] else ""
                await context.write(common_pb2.GetTokenizerChunk(data=part, sha256=sha256).SerializeToString())

        await answer_call(context, answer())

    async def _generate(self, data: bytes, context: CallContext) -> None:
        self._last_received_at = time.time()
        read = partial(read_generate_request, default_request_id=build_request_id())
        asked, is_streamed = await read_message(read, data)
        events = SampleEvents()
        with fields_renamed():
            spec = asked.build_spec(await encode_prompt(asked.prompt, self._tokenizer, self._engine.limits))
            requests = self._engine.submit_samples(
                spec,
                lambda sample, event: events.put_nowait((sample, event)),
                prompt_field=asked.prompt.field,
            )
        named = self._requests.setdefault(asked.request_id, [])
        named += requests
        try:
            await write_answer(context, self._engine, requests, events, VllmAnswer(spec, is_streamed=is_streamed))
        finally:
            self._forget(asked.request_id, requests)

    def _forget(self, request_id: str, requests: Sequence[Request]) -> None:
        left = [request for request in self._requests[request_id] if request not in requests]
        if left:
            self._requests[request_id] = left
        else:
            del self._requests[request_id]

    async def _tell(
        self, request_type: type[Message], build: Callable[[], Message], data: bytes, context: CallContext
    ) -> bytes:
        """Answers a method whose requests say nothing that matters here."""

        async def answer() -> bytes:
            parse(request_type, data)
            return build().SerializeToString()

        return await answer_call(context, answer())

    def _build_health(self) -> pb.HealthCheckResponse:
        if self._is_ready():
            return pb.HealthCheckResponse(healthy=True, message="the engine serves")
        return pb.HealthCheckResponse(healthy=False, message="the engine has no planner, or is shutting down")

    def _get_model_info(self) -> pb.GetModelInfoResponse:
        return self._facts.model_info

    def _build_server_info(self) -> pb.GetServerInfoResponse:
        load = self._engine.load
        info = pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            last_receive_timestamp=self._last_received_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=self._facts.max_running_requests,
        )
        info.MergeFrom(self._facts.server_info)
        return info

    def _build_loads(self) -> pb.GetLoadsResponse:
        load, limits = self._engine.load, self._engine.limits
        num_slots = limits.num_usable_pages * limits.page_size
        scheduler_load = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=round(load.kv_cache_usage * num_slots),
            max_total_num_tokens=num_slots,
            token_usage=load.kv_cache_usage,
            utilization=load.num_running / self._facts.max_running_requests,
            max_running_requests=self._facts.max_running_requests,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._facts.version,
            dp_rank_count=1,
            loads=[scheduler_load],
        )


def _build_flushed() -> common_pb2.FlushCacheResponse:
    return common_pb2.FlushCacheResponse(success=True, message="the engine keeps no prefixes of ended requests")


async def _refuse(why: str, _data: bytes, context: CallContext) -> bytes:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

"""Rules of vLLM's engine API, over a real socket, with a toy model behind it; the client is the package's own."""

import asyncio
import gc
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="the package smg-grpc-proto has the messages of vLLM's engine API")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.calls import FIELD_KEY, REASON_KEY
from engine_service.ledger import deliver_directly
from engine_service.request import GenerationEvent, OnEvent, Request
from engine_service.tokenizer import Tokenizer
from engine_service.tokenizer_archive import TokenizerArchive
from engine_service.vllm_rpc import ARCHIVE_PART_BYTES, SERVICE_NAME, UNIMPLEMENTED, VllmFacts, VllmServicer
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer
from tests.engine_service.toy_engine import ToyEngine, generate_toy_tokens

TOKENIZER = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)
MODEL_INFO = pb.GetModelInfoResponse(model_path="/models/toy", vocab_size=VOCAB_SIZE, is_generation=True)
NUM_PAGES = 401
PAGE_SIZE = 4
FACTS = VllmFacts(MODEL_INFO, pb.GetServerInfoResponse(block_size=PAGE_SIZE), "1.2.3", max_running_requests=4)


@dataclass
class Service:
    """A serving toy engine.

    Args:
        toy: the engine's parts.
        stub: a client's stub on a channel of its own.
        channel: that channel.
        is_ready: what the engine says of itself.
        holds_up: whether the engine is held up once it has told of a step.
        aborted: set once the engine was told to end a request.
    """

    toy: ToyEngine
    stub: Any
    channel: grpc.aio.Channel
    is_ready: bool = True
    holds_up: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def start_long(self, request_id: str = "", num_samples: int = 1) -> Any:
        """Starts a long answer; returns the call once its first part is there, and the engine is held up."""
        self.holds_up = True
        tokens = pb.TokenizedInput(input_ids=[5])
        params = pb.SamplingParams(temperature=0, max_tokens=900, n=num_samples)
        call = self.stub.Generate(
            pb.GenerateRequest(request_id=request_id, tokenized=tokens, sampling_params=params, stream=True)
        )
        assert (await call.read()).HasField("chunk")
        return call

    async def wait_for_load(self, num_requests: int) -> pb.GetLoadsResponse:
        """Returns what the engine tells of its load once it has so many requests."""
        response = await self.stub.GetLoads(pb.GetLoadsRequest())
        while response.loads[0].num_total_reqs != num_requests:
            await asyncio.sleep(0.005)
            response = await self.stub.GetLoads(pb.GetLoadsRequest())
        return response

    def go_on(self) -> None:
        """Lets the engine run."""
        self.holds_up = False
        self.toy.executor.gate.set()

    async def generate(self, tokens: list[int], *, stream: bool, **params: Any) -> list[pb.GenerateResponse]:
        """Returns everything that comes, greedily."""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=tokens),
            sampling_params=pb.SamplingParams(temperature=0, **params),
            stream=stream,
        )
        return [response async for response in self.stub.Generate(request)]

    async def wait_until_idle(self) -> None:
        """Returns once no request is left in the engine and its pages are back."""
        # The toy planner that is watched knows no events.
        while len(self.toy.ledger) or self.toy.planner.num_free_pages != self.toy.limits.num_usable_pages:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def _serve(folder: Path) -> AsyncIterator[Service]:
    loop = asyncio.get_running_loop()
    toy = ToyEngine(
        vocab_size=VOCAB_SIZE,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_running_requests=4,
        clock=loop.time,
        deliver=lambda events: deliver(events),  # noqa: PLW0108  # It needs the service, which is made below.
    )
    engine = toy.build_engine(max_running_requests=4, max_queued_requests=4)
    server = grpc.aio.server()
    target = f"unix:{folder}/engine.sock"
    server.add_insecure_port(target)
    try:
        async with grpc.aio.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            service = Service(toy, vllm_engine_pb2_grpc.VllmEngineStub(channel), channel)

            def deliver(events: Sequence[tuple[OnEvent, GenerationEvent]]) -> None:
                if service.holds_up:
                    # In the engine's thread, between two steps.
                    toy.executor.gate.clear()
                loop.call_soon_threadsafe(deliver_directly, events)

            def abort(request: Request, abort: Callable[[Request], None] = engine.abort) -> None:
                abort(request)
                service.aborted.set()

            engine.abort = abort
            # Digits that do not compress to less than a part.
            digits = random.Random(3).randbytes(2 * ARCHIVE_PART_BYTES).hex()
            archive = TokenizerArchive(TOKENIZER, {"config.json": digits})
            servicer = VllmServicer(engine, TOKENIZER, archive, FACTS, lambda: service.is_ready)
            server.add_generic_rpc_handlers((servicer.build_handler(),))
            engine.start()
            await server.start()
            yield service
    finally:
        toy.executor.gate.set()
        await asyncio.to_thread(engine.stop, 30)
        await server.stop(None)


def run_service(folder: Path, test: Callable[[Service], Awaitable[None]]) -> None:
    """Runs a test on a service of its own."""

    async def main() -> None:
        async with _serve(folder) as service:
            await test(service)

    asyncio.run(main())


def test_every_method_of_the_service_is_answered() -> None:
    """Each method of the proto is served, or refused with a reason."""
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    served = {"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
    assert served | {"FlushCache"} | set(UNIMPLEMENTED) == methods
    assert SERVICE_NAME == "vllm.grpc.engine.VllmEngine"


def test_streamed_answer_has_the_tokens_in_order(tmp_path: Path) -> None:
    """Chunks, then one complete message; tokens in, tokens out."""

    async def test(service: Service) -> None:
        responses = await service.generate([5, 6], stream=True, max_tokens=9)
        kinds = [response.WhichOneof("response") for response in responses]
        assert kinds == ["chunk"] * (len(responses) - 1) + ["complete"]
        expected = generate_toy_tokens([5, 6], 9)
        assert [token_id for response in responses for token_id in response.chunk.token_ids] == expected
        assert sum(response.chunk.completion_tokens for response in responses) == 9
        assert responses[-1].complete == pb.GenerateComplete(
            output_ids=expected, finish_reason="length", prompt_tokens=2, completion_tokens=9
        )

    run_service(tmp_path, test)


def test_answer_that_is_not_streamed_is_one_message_for_each_sample(tmp_path: Path) -> None:
    """Two samples of a greedy answer: the same tokens, each under its number."""

    async def test(service: Service) -> None:
        responses = await service.generate([5, 6], stream=False, max_tokens=7, n=2)
        assert sorted(response.complete.index for response in responses) == [0, 1]
        expected = generate_toy_tokens([5, 6], 7)
        assert [list(response.complete.output_ids) for response in responses] == [expected] * 2

    run_service(tmp_path, test)


def test_text_is_tokenized_with_the_models_tokenizer(tmp_path: Path) -> None:
    """The other form that the proto has."""

    async def test(service: Service) -> None:
        params = pb.SamplingParams(temperature=0, max_tokens=3)
        call = service.stub.Generate(pb.GenerateRequest(text="the planner", sampling_params=params))
        responses = [response async for response in call]
        tokens = build_tokenizer()("the planner")["input_ids"]
        assert list(responses[-1].complete.output_ids) == generate_toy_tokens(tokens, 3)
        assert responses[-1].complete.prompt_tokens == len(tokens)

    run_service(tmp_path, test)


@pytest.mark.parametrize(
    ("request_", "name", "rule"),
    [
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids", "the prompt is empty"),
        (pb.GenerateRequest(tokenized={"input_ids": [1, 384]}), "tokenized.input_ids", "384, at place 1"),
        (pb.GenerateRequest(tokenized={"input_ids": [1] * 1_000}), "tokenized.input_ids", "no room"),
        (pb.GenerateRequest(text=""), "text", "the prompt is empty"),
        (pb.GenerateRequest(text="a" * 32_001), "text", "32001 characters"),
        (pb.GenerateRequest(text="a b " * 900), "text", "no room"),
        (pb.GenerateRequest(text="a", sampling_params={"min_p": 2}), "sampling_params.min_p", "2"),
        (pb.GenerateRequest(text="a", sampling_params={"logprobs": -1}), "sampling_params.logprobs", "-1"),
        (
            pb.GenerateRequest(text="a", sampling_params={"stop_token_ids": [999]}),
            "sampling_params.stop_token_ids",
            "999",
        ),
        (pb.GenerateRequest(text="a", sampling_params={"logit_bias": {-1: 1}}), "sampling_params.logit_bias", "-1"),
        (pb.GenerateRequest(text="a", sampling_params={"min_tokens": 300}), "sampling_params.min_tokens", "256"),
        (pb.GenerateRequest(text="a", sampling_params={"n": 5}), "sampling_params.n", "5"),
        (pb.GenerateRequest(text="a", sampling_params={"regex": "a+"}), "sampling_params.regex", "not supported"),
    ],
)
def test_bad_input_names_field_and_rule(tmp_path: Path, request_: pb.GenerateRequest, name: str, rule: str) -> None:
    """INVALID_ARGUMENT, which the gateway hands on as it is; the next request is answered."""

    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in service.stub.Generate(request_)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        metadata = {key: value for key, value in caught.value.trailing_metadata() if key.startswith("ringplan-")}
        assert metadata == {REASON_KEY: "INVALID_REQUEST", FIELD_KEY: name}
        assert str(caught.value.details()).startswith(f"{name}: ")
        assert rule in str(caught.value.details())
        assert await service.generate([1], stream=False, max_tokens=1)

    run_service(tmp_path, test)


async def read_rest(call: Any) -> list[pb.GenerateComplete]:
    """Returns the ends of a call's samples, in their order."""
    ends = []
    while (response := await call.read()) is not grpc.aio.EOF:
        ends += [response.complete] if response.HasField("complete") else []
    return sorted(ends, key=lambda end: end.index)


def test_abort_by_name_ends_every_sample_and_frees_its_pages(tmp_path: Path) -> None:
    """Its caller is told, other requests go on, and a name that nobody has is left alone."""

    async def test(service: Service) -> None:
        call = await service.start_long("mine", num_samples=2)
        other = asyncio.create_task(service.generate([6], stream=False, max_tokens=20))
        await service.stub.Abort(pb.AbortRequest(request_ids=["nobody", "mine"]))
        service.go_on()
        assert [(end.finish_reason, end.index) for end in await read_rest(call)] == [("abort", 0), ("abort", 1)]
        assert list((await other)[0].complete.output_ids) == generate_toy_tokens([6], 20)
        await service.wait_until_idle()
        assert service.toy.read_metric("ringplan_requests_finished_total", reason="abort") == 2

    run_service(tmp_path, test)


def test_name_may_be_used_again_and_by_two_at_once(tmp_path: Path) -> None:
    """An abort ends all that have the name; one that has ended is no hindrance to the next."""

    async def test(service: Service) -> None:
        for _ in range(2):
            first = await service.start_long("same")
            second = service.stub.Generate(pb.GenerateRequest(request_id="same", text="a", stream=True))
            await service.wait_for_load(2)
            await service.stub.Abort(pb.AbortRequest(request_ids=["same"]))
            service.go_on()
            assert [end.finish_reason for end in [*await read_rest(first), *await read_rest(second)]] == ["abort"] * 2

    run_service(tmp_path, test)


def test_dropped_call_aborts_its_request(tmp_path: Path) -> None:
    """A caller that goes away takes its request along, pages included."""

    async def test(service: Service) -> None:
        call = await service.start_long()
        call.cancel()
        await service.aborted.wait()
        service.go_on()
        await service.wait_until_idle()
        assert service.toy.read_metric("ringplan_requests_finished_total", reason="abort") == 1

    run_service(tmp_path, test)


def test_nothing_is_kept_of_a_request_that_has_ended(tmp_path: Path) -> None:
    """A long-lived engine does not grow with the calls that it has answered."""

    def list_kept() -> list[Request]:
        # Other tests may have kept theirs.
        found = [one for one in gc.get_objects() if type(one) is Request]
        return [request for request in found if request.spec.request_id.startswith("unforgettable")]

    async def test(service: Service) -> None:
        call = await service.start_long("unforgettable", num_samples=2)
        assert len(list_kept()) == 2
        call.cancel()
        service.go_on()
        await service.wait_until_idle()
        while list_kept():
            # The call's own task may take a turn more to end.
            await asyncio.sleep(0.005)
            gc.collect()

    run_service(tmp_path, test)


def test_failed_step_is_an_internal_error(tmp_path: Path) -> None:
    """As in our own service."""

    async def test(service: Service) -> None:
        service.toy.executor.failure = RuntimeError("no memory")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate([5], stream=True)
        assert caught.value.code() is grpc.StatusCode.INTERNAL

    run_service(tmp_path, test)


def test_health_is_that_of_the_engine(tmp_path: Path) -> None:
    """A gateway stops sending requests while there is no planner, and goes on when there is one."""

    async def test(service: Service) -> None:
        assert (await service.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        service.is_ready = False
        answer = await service.stub.HealthCheck(pb.HealthCheckRequest())
        assert not answer.healthy
        assert "planner" in answer.message
        service.is_ready = True
        assert (await service.stub.HealthCheck(pb.HealthCheckRequest())).healthy

    run_service(tmp_path, test)


def test_load_is_that_of_the_engine(tmp_path: Path) -> None:
    """Running and waiting requests, and the slots that are taken, while a step is held up."""

    async def test(service: Service) -> None:
        idle = (await service.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        assert (idle.num_total_reqs, idle.num_used_tokens) == (0, 0)
        call = await service.start_long()
        others = [asyncio.create_task(service.generate([6], stream=False, max_tokens=1)) for _ in range(2)]
        response = await service.wait_for_load(3)
        (load,) = response.loads
        assert (response.version, response.dp_rank_count) == ("1.2.3", 1)
        assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 2, 4)
        assert load.max_total_num_tokens == (NUM_PAGES - 1) * PAGE_SIZE
        assert load.num_used_tokens % PAGE_SIZE == 0
        assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
        assert load.num_used_tokens > 0
        info = await service.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.active_requests == 3
        service.go_on()
        await asyncio.gather(*others)
        call.cancel()

    run_service(tmp_path, test)


def test_model_and_server_are_what_they_are(tmp_path: Path) -> None:
    """What the engine was set up with, and since when it serves."""

    async def test(service: Service) -> None:
        assert await service.stub.GetModelInfo(pb.GetModelInfoRequest()) == MODEL_INFO
        info = await service.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.server_type, info.block_size, info.max_num_seqs, info.data_parallel_size) == (
            "vllm-grpc",
            PAGE_SIZE,
            4,
            1,
        )
        assert (info.last_receive_timestamp, info.is_paused) == (0, False)
        assert info.uptime_seconds > 0
        await service.generate([5], stream=False, max_tokens=1)
        later = await service.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert later.last_receive_timestamp > 0
        assert later.uptime_seconds > info.uptime_seconds

    run_service(tmp_path, test)


def test_tokenizer_comes_in_parts_with_its_fingerprint_at_the_end(tmp_path: Path) -> None:
    """As the gateway checks it: every part but the last without one."""

    async def test(service: Service) -> None:
        call = service.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        parts = [part async for part in call]
        data = b"".join(part.data for part in parts)
        assert len(parts) > 1
        assert max(len(part.data) for part in parts) <= ARCHIVE_PART_BYTES
        assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
        assert data[:2] == b"PK"

    run_service(tmp_path, test)


def test_there_is_no_cache_to_flush(tmp_path: Path) -> None:
    """What the gateway wants to be gone is not there."""

    async def test(service: Service) -> None:
        answer = await service.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert answer.success
        assert "no prefixes" in answer.message

    run_service(tmp_path, test)


@pytest.mark.parametrize("method", UNIMPLEMENTED)
def test_what_the_engine_has_nothing_for_is_unimplemented(tmp_path: Path, method: str) -> None:
    """With the reason; the gateway asks for some of these and goes on without."""

    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary(f"/{SERVICE_NAME}/{method}")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == UNIMPLEMENTED[method]

    run_service(tmp_path, test)


@pytest.mark.parametrize("method", ["Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "FlushCache"])
def test_bytes_that_are_no_message_are_bad_input(tmp_path: Path, method: str) -> None:
    """Garbage gets INVALID_ARGUMENT."""

    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary(f"/{SERVICE_NAME}/{method}")(b"\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_service(tmp_path, test)

"""Rules of the engine's gRPC service, over a real socket, with a toy model behind it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from engine_service import errors
from engine_service.calls import FIELD_KEY, MAX_BYTES_READ_AT_ONCE, REASON_KEY
from engine_service.ledger import deliver_directly
from engine_service.rpc import MAX_DETOKENIZED_TOKENS, SERVICE_NAME, InferenceServicer
from engine_service.tokenizer import Tokenizer
from ringplan.inference.v1 import inference_pb2 as pb
from ringplan.inference.v1 import inference_pb2_grpc
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer
from tests.engine_service.toy_engine import ToyEngine, generate_toy_tokens

MODEL_INFO = pb.GetModelInfoResponse(model="toy", vocab_size=VOCAB_SIZE, eos_token_ids=[0])
TOKENIZER = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)


@dataclass
class Service:
    """A serving toy engine.

    Args:
        toy: the engine's parts.
        stub: a client's stub on a channel of its own.
        channel: that channel.
    """

    toy: ToyEngine
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub"
    channel: grpc.aio.Channel

    async def generate(
        self, request: pb.GenerateRequest, timeout_seconds: float | None = None
    ) -> list[pb.GenerateResponse]:
        """Returns everything that comes."""
        return [response async for response in self.stub.Generate(request, timeout=timeout_seconds)]

    async def wait_until_idle(self) -> None:
        """Returns once no request is left in the engine and its pages are back."""
        # The toy planner that is watched knows no events.
        while len(self.toy.ledger) or self.toy.planner.num_free_pages != self.toy.limits.num_usable_pages:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def _serve(
    folder: Path, *, max_running_requests: int = 4, max_queued_requests: int = 4
) -> AsyncIterator[Service]:
    loop = asyncio.get_running_loop()
    toy = ToyEngine(
        vocab_size=VOCAB_SIZE,
        num_pages=401,
        max_running_requests=max_running_requests,
        clock=loop.time,
        deliver=lambda events: loop.call_soon_threadsafe(deliver_directly, events),
    )
    engine = toy.build_engine(max_running_requests=max_running_requests, max_queued_requests=max_queued_requests)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((InferenceServicer(engine, TOKENIZER, MODEL_INFO).build_handler(),))
    target = f"unix:{folder}/engine.sock"
    server.add_insecure_port(target)
    engine.start()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            yield Service(toy, inference_pb2_grpc.InferenceServiceStub(channel), channel)
    finally:
        toy.executor.gate.set()
        await asyncio.to_thread(engine.stop, 30)
        await server.stop(None)


def run_service(folder: Path, test: Callable[[Service], Awaitable[None]], **options: int) -> None:
    """Runs a test on a service of its own."""

    async def main() -> None:
        async with _serve(folder, **options) as service:
            await test(service)

    asyncio.run(main())


def _metadata(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return {key: value for key, value in error.trailing_metadata() if key.startswith("ringplan-")}


def test_answer_comes_as_deltas_and_one_final(tmp_path: Path) -> None:
    """The stream has the tokens in order, and ends with why and at what cost."""

    async def test(service: Service) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6]), stopping=pb.StoppingParams(max_tokens=9), logprobs=None
        )
        responses = await service.generate(request)
        assert [response.WhichOneof("event") for response in responses[:-1]] == ["delta"] * (len(responses) - 1)
        expected = generate_toy_tokens([5, 6], 9)
        assert [token_id for response in responses for token_id in response.delta.token_ids] == expected
        assert "".join(response.delta.text for response in responses) == "".join(f"{one} " for one in expected)
        assert responses[-1].final == pb.GenerateFinal(
            finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=2, completion_tokens=9)
        )

    run_service(tmp_path, test)


def test_text_and_messages_are_the_tokenizers_tokens(tmp_path: Path) -> None:
    """A prompt as text or conversation is turned into the model's own tokens."""

    async def test(service: Service) -> None:
        stopping = pb.StoppingParams(max_tokens=1)
        tokens = TOKENIZER.backend("the engine")["input_ids"]
        responses = await service.generate(pb.GenerateRequest(text="the engine", stopping=stopping))
        assert responses[0].delta.token_ids == generate_toy_tokens(tokens, 1)
        rendered = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        tokens = TOKENIZER.backend(rendered)["input_ids"]
        messages = [pb.ChatMessage(role="user", content="hi")]
        responses = await service.generate(pb.GenerateRequest(messages=messages, stopping=stopping))
        assert responses[0].delta.token_ids == generate_toy_tokens(tokens, 1)
        assert responses[-1].final.usage.prompt_tokens == len(tokens)

    run_service(tmp_path, test)


@pytest.mark.parametrize(
    ("request_", "field", "rule"),
    [
        (pb.GenerateRequest(text=""), "text", "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids", "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 384])), "token_ids", "384, at place 1"),
        (pb.GenerateRequest(text="a b " * 900), "text", "1000 tokens"),
        # So long that it is not even turned into tokens.
        (pb.GenerateRequest(text="a b " * 9_000), "text", "36000 characters are more than 32000"),
        (
            pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="a" * 13)] * 2_000),
            "messages",
            "34000 characters",
        ),
        (
            pb.GenerateRequest(text="a", guidance=[pb.GuidanceContext(text="a" * 32_001, scale=1)]),
            "guidance[0].text",
            "32001 characters",
        ),
        # Their number comes first: looking at each of millions would hold up the other calls.
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999] * 1_000)), "token_ids", "a prompt of 1000 tokens"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=1.5)), "sampling.top_p", "1.5"),
        (
            pb.GenerateRequest(text="a", stopping=pb.StoppingParams(stop_token_ids=[-1])),
            "stopping.stop_token_ids",
            "-1",
        ),
        (pb.GenerateRequest(text="a", logprobs=21), "logprobs", "21"),
        (pb.GenerateRequest(text="a", prompt_logprobs=-1), "prompt_logprobs", "-1"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(min_tokens=300)), "stopping.min_tokens", "256"),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias={384: 1})),
            "sampling.logit_bias",
            "384",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[384]), echo=True), "token_ids", "384"),
        (pb.GenerateRequest(messages=[pb.ChatMessage(role="pirate")]), "messages", "unknown role pirate"),
    ],
)
def test_bad_input_names_field_and_rule(tmp_path: Path, request_: pb.GenerateRequest, field: str, rule: str) -> None:
    """INVALID_ARGUMENT, the field for programs, the rule for people; the next request is answered."""

    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert _metadata(caught.value) == {REASON_KEY: "INVALID_REQUEST", FIELD_KEY: field}
        assert str(caught.value.details()).startswith(f"{field}: ")
        assert rule in str(caught.value.details())
        await service.generate(pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=1)))

    run_service(tmp_path, test)


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModelInfo"])
def test_bytes_that_are_no_message_are_bad_input(tmp_path: Path, method: str) -> None:
    """Garbage, and text that is not UTF-8, get INVALID_ARGUMENT from every method."""

    async def test(service: Service) -> None:
        path = f"/{SERVICE_NAME}/{method}"
        for data in (b"\xff\xff", pb.GenerateRequest(text="QQ").SerializeToString().replace(b"QQ", b"\xc3\x28")):
            if method in {"Detokenize", "GetModelInfo"} and data[:1] != b"\xff":
                continue
            answer: Awaitable[object] = service.channel.unary_unary(path)(data)
            if method == "Generate":
                answer = service.channel.unary_stream(path)(data).read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_service(tmp_path, test)


def test_text_far_beyond_the_context_never_reaches_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the tokenizer from everybody for seconds or minutes; the same goes for the way back."""
    monkeypatch.setattr(TOKENIZER, "backend", None)
    monkeypatch.setattr(TOKENIZER, "_compiled", None)

    async def test(service: Service) -> None:
        calls: list[Awaitable[object]] = [
            service.generate(pb.GenerateRequest(text="a" * 32_001)),
            service.stub.Tokenize(pb.TokenizeRequest(text="a" * 32_001)),
            service.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * (MAX_DETOKENIZED_TOKENS + 1))),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_service(tmp_path, test)


def test_message_of_many_parts_holds_up_nobody(tmp_path: Path) -> None:
    """While 300,000 messages are read, which takes most of a second, the event loop goes on."""

    async def test(service: Service) -> None:
        data = pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="a")] * 300_000).SerializeToString()
        call = asyncio.ensure_future(service.channel.unary_stream(f"/{SERVICE_NAME}/Generate")(data).read())
        num_ticks = 0
        while not call.done():
            await asyncio.sleep(0.001)
            num_ticks += 1
        with pytest.raises(grpc.aio.AioRpcError, match="characters are more than"):
            await call
        # Without a thread there are as many as pass while the message is on its way.
        assert len(data) > MAX_BYTES_READ_AT_ONCE
        assert num_ticks > 20

    run_service(tmp_path, test)


def test_long_details_reach_the_caller_with_their_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status message travels in headers, percent-encoded: one that is too long would cost the caller the status."""

    def refuse(*_args: object, **_given: object) -> list[int]:
        raise errors.InvalidRequestError("messages", "日本🙂" * 5_000)

    monkeypatch.setattr(TOKENIZER, "encode_chat", refuse)

    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate(pb.GenerateRequest(messages=[pb.ChatMessage(role="user")]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert _metadata(caught.value) == {REASON_KEY: "INVALID_REQUEST", FIELD_KEY: "messages"}
        assert str(caught.value.details()).startswith("messages: 日本🙂日本")

    run_service(tmp_path, test)


def test_full_queue_is_told_at_once(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED without waiting; those that were taken are answered."""

    async def test(service: Service) -> None:
        service.toy.executor.gate.clear()
        request = pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=2))
        taken = [asyncio.create_task(service.generate(request)) for _ in range(2)]
        refused = []
        while not refused:
            extra = asyncio.create_task(service.generate(request))
            done, _ = await asyncio.wait([extra], timeout=0.2)
            refused += [task for task in done if task.exception() is not None]
            taken += [extra] if extra not in refused else []
        error = refused[0].exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert _metadata(error) == {REASON_KEY: "QUEUE_FULL"}
        service.toy.executor.gate.set()
        assert [len(responses) > 0 for responses in await asyncio.gather(*taken)] == [True] * 3

    run_service(tmp_path, test, max_running_requests=1, max_queued_requests=2)


def test_dropped_call_aborts_its_request(tmp_path: Path) -> None:
    """A caller that goes away takes its request along, pages included."""

    async def test(service: Service) -> None:
        call = service.stub.Generate(pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=900)))
        async for _ in call:
            break
        call.cancel()
        await service.wait_until_idle()
        assert service.toy.read_metric("ringplan_requests_finished_total", reason="abort") == 1

    run_service(tmp_path, test)


@pytest.mark.parametrize("is_running", [True, False])
def test_deadline_ends_the_call_and_the_request(tmp_path: Path, is_running: bool) -> None:
    """DEADLINE_EXCEEDED for a request that runs and for one that waits; neither stays in the engine."""

    async def test(service: Service) -> None:
        service.toy.executor.gate.clear()
        asked = [pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=900))] * (1 if is_running else 2)
        calls = [asyncio.create_task(service.generate(request, timeout_seconds=0.3)) for request in asked]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        service.toy.executor.gate.set()
        await service.wait_until_idle()

    run_service(tmp_path, test, max_running_requests=1, max_queued_requests=4)


def test_failed_step_is_an_internal_error(tmp_path: Path) -> None:
    """The caller of a request whose step failed is told so, with a reason."""

    async def test(service: Service) -> None:
        service.toy.executor.failure = RuntimeError("no memory")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate(pb.GenerateRequest(text="a"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert _metadata(caught.value) == {REASON_KEY: "STEP_FAILED"}

    run_service(tmp_path, test)


def test_fault_within_a_call_is_an_internal_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw ends its call with INTERNAL, and no other."""

    async def test(service: Service) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(TOKENIZER, "encode", lambda *_args, **_options: 1 // 0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.stub.Tokenize(pb.TokenizeRequest(text="a"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert _metadata(caught.value) == {REASON_KEY: "INTERNAL"}
        await service.stub.Tokenize(pb.TokenizeRequest(text="a"))

    run_service(tmp_path, test)


def test_model_info_is_what_the_server_gave(tmp_path: Path) -> None:
    """GetModelInfo answers for the loaded model."""

    async def test(service: Service) -> None:
        assert await service.stub.GetModelInfo(pb.GetModelInfoRequest()) == MODEL_INFO

    run_service(tmp_path, test)


def test_tokenize_and_detokenize_are_the_models_own(tmp_path: Path) -> None:
    """Text to tokens and back, special tokens in or out as asked."""

    async def test(service: Service) -> None:
        text = "the planner ü"
        tokens = (await service.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
        assert list(tokens) == TOKENIZER.backend(text)["input_ids"]
        chat = await service.stub.Tokenize(pb.TokenizeRequest(messages=[pb.ChatMessage(role="user", content="hi")]))
        with_special = await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=chat.token_ids))
        assert with_special.text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        without = await service.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=chat.token_ids, skip_special_tokens=True)
        )
        assert without.text == "user\nhi\nassistant\n"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]))
        assert _metadata(caught.value)[FIELD_KEY] == "token_ids"

    run_service(tmp_path, test)

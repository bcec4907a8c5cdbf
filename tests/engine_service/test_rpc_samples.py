"""Rules of guided requests and of several samples over gRPC, with a toy model behind it."""

import asyncio
from pathlib import Path

import grpc
import pytest

from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_service.test_rpc import TOKENIZER, Service, run_service
from tests.engine_service.toy_engine import generate_toy_tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def _tokens(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


def _context(**given: object) -> pb.GuidanceContext:
    return pb.GuidanceContext(**{"scale": 1.5, **given})  # type: ignore[arg-type]  # The cases have different types.


def _read_tokens(responses: list[pb.GenerateResponse], sample: int) -> list[int]:
    return [one for response in responses if response.sample == sample for one in response.delta.token_ids]


def test_contexts_arrive_in_each_of_their_forms(tmp_path: Path) -> None:
    """A context is text, a conversation or tokens, as a prompt is."""

    async def test(service: Service) -> None:
        messages = [pb.ChatMessage(role="user", content="hi")]
        request = pb.GenerateRequest(
            token_ids=_tokens(*PROMPT),
            guidance=[_context(text="the engine"), _context(messages=messages)],
            stopping=pb.StoppingParams(max_tokens=6),
        )
        encoded = [
            TOKENIZER.encode("the engine", field="text"),
            (await service.stub.Tokenize(pb.TokenizeRequest(messages=messages))).token_ids,
        ]
        responses = await service.generate(request)
        assert _read_tokens(responses, 0) == generate_toy_tokens(PROMPT, 6, [list(one) for one in encoded])

    run_service(tmp_path, test)


@pytest.mark.parametrize(
    ("contexts", "field"),
    [
        ([pb.GuidanceContext(text="a")], "guidance[0].scale"),
        ([_context(text="a", scale=-1.0)], "guidance[0].scale"),
        ([_context(text="a"), _context()], "guidance[1].text"),
        ([_context(text="")], "guidance[0].text"),
        ([_context(text="a", token_ids=_tokens(1))], "guidance[0].token_ids"),
        ([_context(token_ids=_tokens())], "guidance[0].token_ids"),
        ([_context(token_ids=_tokens(5, 100_000))], "guidance[0].token_ids"),
        ([_context(messages=[pb.ChatMessage(role="", content="x")])], "guidance[0].messages[0].role"),
        ([_context(messages=[pb.ChatMessage(role="judge", content="x")])], "guidance[0].messages"),
        ([_context(text="a")] * 3, "guidance"),
    ],
)
def test_context_that_breaks_a_rule_is_refused_by_name(
    tmp_path: Path, contexts: list[pb.GuidanceContext], field: str
) -> None:
    """INVALID_ARGUMENT names the field within the context."""
    request = pb.GenerateRequest(token_ids=_tokens(1, 2), guidance=contexts)
    _expect_refusal(tmp_path, request, field)


@pytest.mark.parametrize("num_samples", [0, -3, 5])
def test_number_of_samples_out_of_range_is_refused(tmp_path: Path, num_samples: int) -> None:
    """From one to as many as run at once, which are 4 here."""
    _expect_refusal(tmp_path, pb.GenerateRequest(token_ids=_tokens(1, 2), n=num_samples), "n")


def _expect_refusal(folder: Path, request: pb.GenerateRequest, field: str) -> None:
    async def test(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        metadata = dict(caught.value.trailing_metadata())  # type: ignore[arg-type]  # They are pairs.
        assert metadata["ringplan-field"] == field
        details = caught.value.details()
        assert details is not None
        assert details.startswith(f"{field}: ")

    run_service(folder, test)


def test_every_sample_has_its_tokens_and_its_end(tmp_path: Path) -> None:
    """Messages carry the sample's number; each sample ends once, and the last end ends the answer."""

    async def test(service: Service) -> None:
        request = pb.GenerateRequest(
            token_ids=_tokens(*PROMPT), n=3, stopping=pb.StoppingParams(max_tokens=5), echo=True, prompt_logprobs=None
        )
        responses = await service.generate(request)
        assert responses[0].WhichOneof("event") == "prompt"
        assert [response.WhichOneof("event") for response in responses].count("prompt") == 1
        for sample in range(3):
            mine = [response for response in responses if response.sample == sample]
            assert _read_tokens(mine, sample) == generate_toy_tokens(PROMPT, 5)
            assert [response.HasField("final") for response in mine[:-1]] == [False] * (len(mine) - 1)
            assert mine[-1].final.finish_reason == pb.FINISH_REASON_LENGTH
            assert mine[-1].final.usage == pb.Usage(
                prompt_tokens=12, completion_tokens=5, cached_tokens=11 if sample else 0
            )
        assert responses[-1].HasField("final")

    run_service(tmp_path, test)


def test_dropped_call_aborts_every_sample(tmp_path: Path) -> None:
    """All their pages are back."""

    async def test(service: Service) -> None:
        request = pb.GenerateRequest(token_ids=_tokens(*PROMPT), n=4, stopping=pb.StoppingParams(max_tokens=300))
        call = service.stub.Generate(request)
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(service.wait_until_idle(), 30)

    run_service(tmp_path, test)


def test_samples_count_in_the_queue(tmp_path: Path) -> None:
    """A request for more samples than there is room for is refused whole."""

    async def test(service: Service) -> None:
        service.toy.executor.gate.clear()
        request = pb.GenerateRequest(token_ids=_tokens(1), n=4, stopping=pb.StoppingParams(max_tokens=2))
        answer = asyncio.ensure_future(service.generate(request))
        while len(service.toy.ledger) < 4:  # noqa: ASYNC110  # The toy engine that is watched knows no events.
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        service.toy.executor.gate.set()
        assert sum(response.HasField("final") for response in await answer) == 4

    run_service(tmp_path, test, max_running_requests=4, max_queued_requests=3)

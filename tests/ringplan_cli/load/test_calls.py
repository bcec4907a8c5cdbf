"""Calls to a real server: what comes is taken down, and what goes wrong is told apart."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.load.calls import InferenceCaller
from ringplan_cli.load.records import Outcome, RequestRecord
from ringplan_cli.load.schedule import LoadRequest
from tests.ringplan_cli.fake_engine import Answer, refuse, say, serve_fake_engine


def call(folder: Path, answer: Answer, *, n: int = 1, timeout_seconds: float = 20.0) -> RequestRecord:
    """Sends one request to an engine that answers in a given way; the clock counts 1, 2, 3, ..."""
    record = RequestRecord(0, LoadRequest(0.0, 1, 8, prompt_tokens=4, n=n))
    ticks = itertools.count(1)

    async def send(target: str) -> None:
        caller = InferenceCaller(
            target, lambda _record: pb.GenerateRequest(text="a"), lambda: next(ticks), timeout_seconds
        )
        async with caller:
            await caller.send(record)

    with serve_fake_engine(folder, answer) as (target, _):
        asyncio.run(send(target))
    return record


def final(sample: int = 0, reason: pb.FinishReason = pb.FINISH_REASON_LENGTH) -> pb.GenerateResponse:
    """Builds the end of a sample."""
    return pb.GenerateResponse(sample=sample, final=pb.GenerateFinal(finish_reason=reason))


def delta(num_tokens: int, sample: int = 0) -> pb.GenerateResponse:
    """Builds a message with tokens."""
    return pb.GenerateResponse(sample=sample, delta=pb.GenerateDelta(token_ids=[1] * num_tokens))


def test_completed_request_has_the_times_of_its_messages(tmp_path: Path) -> None:
    """Sent at 1, tokens at 2 and 3, its end at 4."""
    record = call(tmp_path, say("a", "b"))
    assert record.outcome is Outcome.COMPLETED
    assert (record.sent_seconds, record.samples[0].seconds, record.ended_seconds) == (1, [2, 3], 4)
    assert (record.finish_reasons, record.usage_prompt_tokens) == (["stop"], 9)


def test_samples_are_kept_apart_and_all_of_them_awaited(tmp_path: Path) -> None:
    """A request for two samples has ended with the second final message."""

    def answer(_request: pb.GenerateRequest, _context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from (delta(1), delta(3, 1), final(0), delta(1, 1), final(1))

    record = call(tmp_path, answer, n=2)
    assert record.outcome is Outcome.COMPLETED
    assert {sample: times.num_tokens for sample, times in record.samples.items()} == {0: [1], 1: [3, 1]}
    assert record.ended_seconds == 6


@pytest.mark.parametrize(
    ("responses", "reason"),
    [
        ([delta(1)], "NO_FINAL_MESSAGE"),
        ([delta(1), final(), delta(1, 1)], "NO_FINAL_MESSAGE"),
        ([delta(1), final(), final(1, pb.FINISH_REASON_ABORT)], "ABORTED_BY_ENGINE"),
    ],
)
def test_answer_that_is_not_whole_is_a_failure(
    tmp_path: Path, responses: list[pb.GenerateResponse], reason: str
) -> None:
    """A stream that ends well without its finals, or that the engine gave up, is not completed."""
    record = call(tmp_path, lambda _request, _context: iter(responses), n=2)
    assert (record.outcome, record.reason) == (Outcome.FAILED, reason)


def abort(code: grpc.StatusCode, reason: str | None, *, num_tokens: int = 0) -> Answer:
    """Returns an answer that breaks off, with the engine's machine-readable reason or without one."""

    def answer(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if num_tokens:
            yield delta(num_tokens)
        if reason is not None:
            context.set_trailing_metadata((("ringplan-reason", reason),))
        context.abort(code, "in words")

    return answer


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), Outcome.REFUSED, "QUEUE_FULL"),
        (abort(grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE"), Outcome.REFUSED, "REQUEST_TOO_LARGE"),
        (abort(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN"), Outcome.REFUSED, "SHUTTING_DOWN"),
        (abort(grpc.StatusCode.UNAVAILABLE, None), Outcome.FAILED, "UNAVAILABLE"),
        (abort(grpc.StatusCode.RESOURCE_EXHAUSTED, None), Outcome.REFUSED, "RESOURCE_EXHAUSTED"),
        (abort(grpc.StatusCode.INTERNAL, "STEP_FAILED"), Outcome.FAILED, "STEP_FAILED"),
        (abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", num_tokens=1), Outcome.FAILED, "QUEUE_FULL"),
    ],
)
def test_what_was_turned_away_is_told_from_what_broke(
    tmp_path: Path, answer: Answer, outcome: Outcome, reason: str
) -> None:
    """A refusal comes before any token, from an engine that says why; the engine's own word is the reason."""
    record = call(tmp_path, answer)
    assert (record.outcome, record.reason, record.details) == (outcome, reason, "in words")
    assert record.ended_seconds is not None


def test_details_are_kept_short(tmp_path: Path) -> None:
    """A requests file does not swell with somebody's messages."""
    assert len(call(tmp_path, refuse(grpc.StatusCode.INTERNAL, "x" * 2_000)).details) == 500


def test_call_that_takes_too_long_fails_with_its_deadline(tmp_path: Path) -> None:
    """`--timeout-seconds` ends it."""

    def answer(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(20)
        yield from ()

    record = call(tmp_path, answer, timeout_seconds=0.5)
    assert (record.outcome, record.reason) == (Outcome.FAILED, "DEADLINE_EXCEEDED")

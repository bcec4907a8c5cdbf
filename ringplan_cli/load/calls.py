"""Sends the requests of a load over gRPC and takes note of what comes."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan.inference.v1 import inference_pb2_grpc
from ringplan_cli.inference_client import build_engine_target
from ringplan_cli.load.records import Outcome, RequestRecord
from ringplan_cli.plain_messages import name_value

REASON_KEY = "ringplan-reason"
# A call that ended with one of these before any token came was turned away; others broke.
REFUSALS = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
CONNECT_SECONDS = 10.0
_MAX_DETAILS_CHARACTERS = 500

# Sends a request; returns when it has ended, with the record filled in.
Send = Callable[[RequestRecord], Awaitable[None]]


class InferenceCaller:
    """A connection to an engine that carries any number of calls at once.

    Args:
        target: "host:port" or "unix:/path".
        build_message: makes the message of a record's request.
        clock: seconds from the start of the load.
        timeout_seconds: how long a call may take.

    Attributes:
        num_tokens: tokens that have come, of all calls.
    """

    def __init__(
        self,
        target: str,
        build_message: Callable[[RequestRecord], pb.GenerateRequest],
        clock: Callable[[], float],
        timeout_seconds: float,
    ) -> None:
        self.num_tokens = 0
        # An engine on this machine or in this cluster is not behind the proxy that leads out of it. A call that is made
        # while the engine is away fails at once, as it does for others.
        self._channel = grpc.aio.insecure_channel(build_engine_target(target), options=[("grpc.enable_http_proxy", 0)])
        self._service: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._build_message, self._clock, self._timeout_seconds = build_message, clock, timeout_seconds

    async def __aenter__(self) -> "InferenceCaller":
        # The first request does not pay for the connection.
        await asyncio.wait_for(self._channel.channel_ready(), CONNECT_SECONDS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def send(self, record: RequestRecord) -> None:
        """Sends a request and reads its answer to the end.

        Args:
            record: of the request; it is filled in.
        """
        message = self._build_message(record)
        record.sent_seconds, record.outcome = self._clock(), Outcome.RUNNING
        call = self._service.Generate(message, timeout=self._timeout_seconds)
        try:
            async for response in call:
                now = self._clock()
                num_tokens = len(response.delta.token_ids)
                self.num_tokens += num_tokens
                record.add_tokens(response.sample, num_tokens, now)
                if response.HasField("final"):
                    _take_final(record, response.final, now)
        except grpc.aio.AioRpcError as error:
            _take_error(record, error, self._clock())
        else:
            _check_complete(record, self._clock())
        finally:
            call.cancel()


def _take_final(record: RequestRecord, final: pb.GenerateFinal, now: float) -> None:
    record.finish_reasons.append(name_value(pb.FinishReason.DESCRIPTOR, final.finish_reason))
    record.usage_prompt_tokens = final.usage.prompt_tokens
    if len(record.finish_reasons) == record.request.n:
        record.ended_seconds = now


def _check_complete(record: RequestRecord, now: float) -> None:
    """An engine that stops aborts what runs and says so in a final message; that is no answer."""
    if len(record.finish_reasons) < record.request.n:
        record.outcome, record.reason, record.ended_seconds = Outcome.FAILED, "NO_FINAL_MESSAGE", now
    elif "abort" in record.finish_reasons:
        record.outcome, record.reason = Outcome.FAILED, "ABORTED_BY_ENGINE"
    else:
        record.outcome = Outcome.COMPLETED


def _take_error(record: RequestRecord, error: grpc.aio.AioRpcError, now: float) -> None:
    trailers: Any = error.trailing_metadata() or ()  # grpc-stubs has it as one pair.
    reason = next((value for key, value in trailers if key == REASON_KEY), None)
    record.reason = reason if isinstance(reason, str) else error.code().name
    record.details = (error.details() or "")[:_MAX_DETAILS_CHARACTERS]
    # An engine that is there and stopping gives its reason; one that is not there cannot.
    is_refusal = error.code() in REFUSALS or (error.code() is grpc.StatusCode.UNAVAILABLE and reason is not None)
    record.outcome = Outcome.REFUSED if is_refusal and not record.samples else Outcome.FAILED
    record.ended_seconds = now

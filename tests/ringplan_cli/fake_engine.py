"""An `InferenceService` that answers as a test tells it, on a real socket."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from planner_service.unix_socket import build_target
from ringplan.inference.v1 import inference_pb2, inference_pb2_grpc

Answer = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]]

MODEL_INFO = inference_pb2.GetModelInfoResponse(
    model="tiny", max_context_tokens=2048, vocab_size=384, eos_token_ids=[2], has_chat_template=True
)


class FakeEngine(inference_pb2_grpc.InferenceServiceServicer):
    """The service.

    Args:
        answer: makes the answer of each request.

    Attributes:
        requests: what was asked.
    """

    def __init__(self, answer: Answer) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self._answer = answer

    def GetModelInfo(  # noqa: N802  # gRPC's name.
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        """Describes a model."""
        return MODEL_INFO

    def Generate(  # noqa: N802  # gRPC's name.
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Answers as the test says."""
        self.requests.append(request)
        yield from self._answer(request, context)


@contextmanager
def serve_fake_engine(folder: Path, answer: Answer) -> Iterator[tuple[str, FakeEngine]]:
    """Serves while the context lasts.

    Args:
        folder: where the socket goes.
        answer: makes the answer of each request.

    Yields:
        The target and the service.
    """
    target, service = f"unix:{folder}/engine.sock", FakeEngine(answer)
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    server.add_insecure_port(build_target(target))
    server.start()
    try:
        yield target, service
    finally:
        server.stop(None).wait()


def say(*texts: str, reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_STOP) -> Answer:
    """Returns an answer of one delta a text and a final message."""

    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        for text in texts:
            yield inference_pb2.GenerateResponse(delta=inference_pb2.GenerateDelta(text=text, token_ids=[1]))
        usage = inference_pb2.Usage(prompt_tokens=9, completion_tokens=len(texts))
        yield inference_pb2.GenerateResponse(final=inference_pb2.GenerateFinal(finish_reason=reason, usage=usage))

    return answer


def refuse(status: grpc.StatusCode, details: str) -> Answer:
    """Returns an answer that is an error."""

    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        yield from ()
        context.abort(status, details)

    return answer

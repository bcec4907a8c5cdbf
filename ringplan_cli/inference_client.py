"""Talks to an engine's `InferenceService`; its failures become one clear line."""

from collections.abc import Iterator
from types import TracebackType

import grpc

from planner_service.unix_socket import build_target, find_fault
from ringplan.inference.v1 import inference_pb2, inference_pb2_grpc
from ringplan_cli.errors import CommandError

CONNECT_SECONDS = 10.0


def build_engine_target(address: str) -> str:
    """Returns the gRPC target of an engine's address.

    Args:
        address: "unix:/path", a path alone if it begins with "/" or ".", "host:port", or any other gRPC target.

    Raises:
        CommandError: nothing can be there.
    """
    is_path = address.startswith(("unix:", "/", "."))
    # Of another gRPC target, as "dns:///host:port", only the end is an address.
    fault = find_fault(address if is_path else address.rpartition("/")[2])
    if fault is not None:
        raise CommandError(f"{address or 'the target'}: {fault}")
    return build_target(address) if is_path else address


class InferenceClient:
    """A connection to one engine.

    Args:
        target: "host:port", "unix:/path" or a path.

    Raises:
        CommandError: nothing can be there.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        # An engine on this machine or in this cluster is not behind the proxy that leads out of it.
        self._channel = grpc.insecure_channel(build_engine_target(target), options=[("grpc.enable_http_proxy", 0)])
        self._service = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> "InferenceClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def fetch_model_info(self) -> inference_pb2.GetModelInfoResponse:
        """Asks which model the engine has loaded.

        Raises:
            CommandError: there is no answer.
        """
        try:
            return self._service.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_seconds: float | None
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Streams the answer to a request. Leaving the iteration early aborts the request.

        Args:
            request: what to answer.
            timeout_seconds: when to give up, or None for never.

        Raises:
            CommandError: the engine refused the request or broke off.
        """
        call = self._service.Generate(request, timeout=timeout_seconds)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]  # So it is in grpc-stubs.

    def _translate(self, error: grpc.RpcError) -> CommandError:
        status, details = error.code(), error.details() or "no reason given"
        if status is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            return CommandError(f"no engine serves {self._target}: start one with `ringplan serve`, or add --local")
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandError(f"{self._target} did not finish in time")
        if status is grpc.StatusCode.INVALID_ARGUMENT:
            return CommandError(details, exit_code=2)
        return CommandError(f"{self._target}: {details} ({status.name})")

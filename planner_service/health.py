"""The standard gRPC health check, as a client: for probes and for people."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planner_service.client_errors import ClientError
from planner_service.unix_socket import build_target, find_fault


class HealthCheckError(ClientError):
    """Raised when a health check gets no answer, or the server has no such service.

    Attributes:
        target: the server's address.
        reason: why, in words.
        status: the gRPC status code's name.
    """

    def __init__(self, target: str, reason: str, status: str) -> None:
        super().__init__(f"{target}: {reason} ({status})")
        self.target = target
        self.reason = reason
        self.status = status


def check(target: str, timeout_seconds: float, service: str = "") -> bool:
    """Asks a server whether it serves.

    Args:
        target: its address: "unix:/path", a bare path that starts with "/", or "host:port".
        timeout_seconds: how long to wait for the answer. A server that cannot be reached is not waited for.
        service: the full name of the service to ask about; empty asks about the server.

    Returns:
        Whether it serves; False also for one that is about to end.

    Raises:
        HealthCheckError: the address is none, there is no answer, or the server has no such service.
    """
    fault = find_fault(target)
    if fault is not None:
        raise HealthCheckError(target, fault, grpc.StatusCode.INVALID_ARGUMENT.name)
    address = build_target(target)
    # A probe asks one question: it needs no proxy, and must not share a connection that somebody else broke.
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise HealthCheckError(target, error.details() or "no answer", error.code().name) from error
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

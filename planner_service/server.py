"""The planner as a process: its socket, its metrics, and how it ends."""

import asyncio
import concurrent.futures
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from planner_service.captures import CaptureFolder
from planner_service.config import PlannerSettings
from planner_service.errors import MetricsAddressError, PlannerError
from planner_service.logs import configure_logs
from planner_service.messages import SessionSummary
from planner_service.metrics import PlannerMetrics
from planner_service.region import RegionFolder
from planner_service.rpc import SERVICE_NAME, PlannerServicer
from planner_service.sessions import OpenSessions
from planner_service.unix_socket import SocketClaim
from planner_service.version import read_version

EXIT_OK = 0
EXIT_CANNOT_START = 1

# Layouts and dumps grow with an engine's batch and its pages, and the other end is on this machine.
_SERVER_OPTIONS = (("grpc.max_receive_message_length", 256 << 20), ("grpc.max_send_message_length", -1))
_SUMMARY_SECONDS = 5.0
_STOP_SECONDS = 3.0  # for ended calls to tell their engines why; a busy machine needs more than one

_logger = logging.getLogger(__name__)


def run(settings: PlannerSettings) -> int:
    """Serves until SIGTERM or SIGINT; a second signal ends it without waiting for open sessions.

    Args:
        settings: what the planner is to be.

    Returns:
        The process's exit code: 0 after a signal, 1 if the planner cannot start.
    """
    configure_logs(settings.log_level, as_json=settings.log_json)
    try:
        asyncio.run(_serve(settings))
    except PlannerError as error:
        _logger.critical("the planner cannot start: %s", error)
        return EXIT_CANNOT_START
    return EXIT_OK


class _Signals:
    """Counts the signals that ask the process to end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count, number)

    def _count(self, number: signal.Signals) -> None:
        _logger.info("got %s", number.name)
        (self.second if self.first.is_set() else self.first).set()


async def _serve(settings: PlannerSettings) -> None:
    """Starts everything, waits for a signal, and ends everything."""
    signals = _Signals()
    with ExitStack() as stack:
        # The socket comes first: whoever has it is the planner here.
        claim = SocketClaim(settings.socket)
        stack.callback(claim.release)
        folder = RegionFolder(settings.ring_dir)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # It has no annotations.
        registry = CollectorRegistry()
        version = read_version()
        captures = CaptureFolder(settings.capture_dir, settings.max_captures)
        metrics = PlannerMetrics(registry, version, captures)
        sessions = OpenSessions(
            folder,
            metrics,
            max_sessions=settings.max_sessions,
            ring_timeout_seconds=settings.ring_timeout_seconds,
            num_cache_entries=settings.cache_entries,
            clock=time.monotonic,
        )
        servicer = PlannerServicer(
            sessions,
            metrics,
            default_ring_depth=settings.ring_depth,
            default_cache_mode=settings.cache_mode,
            version=version,
            clock=time.monotonic,
            allows_drills=settings.allow_drills,
        )
        loop = asyncio.get_running_loop()
        metrics.watch_sessions(lambda: _summarize_from_thread(sessions, loop))
        async with _serve_metrics(settings, registry) as metrics_url:
            server = grpc.aio.server(options=_SERVER_OPTIONS)
            server.add_generic_rpc_handlers((servicer.build_handler(),))
            reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # The stubs lack it.
            health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
            for service in (health.OVERALL_HEALTH, SERVICE_NAME):
                await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
            claim.bind(server.add_insecure_port)
            await server.start()
            _log_ready(settings, claim, version, metrics_url)
            await signals.first.wait()
            await health_servicer.enter_graceful_shutdown()
            sessions.refuse_new()
            await _end_sessions(settings, sessions, servicer, signals)
            await server.stop(_STOP_SECONDS)
    _logger.info("stopped")


async def _end_sessions(
    settings: PlannerSettings, sessions: OpenSessions, servicer: PlannerServicer, signals: _Signals
) -> None:
    """Lets open sessions end by themselves for a while, then ends them."""
    if len(sessions):
        _logger.info("%d open sessions have %g s to end", len(sessions), settings.shutdown_grace_seconds)
    idle = asyncio.ensure_future(servicer.wait_until_idle())
    hurry = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait((idle, hurry), timeout=settings.shutdown_grace_seconds, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    hurry.cancel()
    await asyncio.wait((asyncio.ensure_future(servicer.end_sessions()),), timeout=_STOP_SECONDS)


@asynccontextmanager
async def _serve_metrics(settings: PlannerSettings, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves metrics over HTTP, from threads of its own; yields their address."""
    host = settings.metrics_host
    try:
        httpd, thread = start_http_server(settings.metrics_port, host, registry)
    except OSError as error:
        raise MetricsAddressError(f"{host}:{settings.metrics_port}", error.strerror or str(error)) from error
    except UnicodeError as error:
        raise MetricsAddressError(f"{host}:{settings.metrics_port}", "not the name of a host") from error
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{httpd.server_port}/metrics"
    finally:
        await asyncio.to_thread(httpd.shutdown)
        httpd.server_close()
        thread.join()


def _summarize_from_thread(sessions: OpenSessions, loop: asyncio.AbstractEventLoop) -> Sequence[SessionSummary]:
    """Asks the event loop's thread, which owns the sessions; a scrape goes without them if it is too busy."""

    async def summarize() -> Sequence[SessionSummary]:
        return sessions.summarize()

    future = asyncio.run_coroutine_threadsafe(summarize(), loop)
    try:
        return future.result(_SUMMARY_SECONDS)
    except (TimeoutError, concurrent.futures.CancelledError):
        future.cancel()
        _logger.warning("metrics were served without the sessions' gauges: the planner is busy or ends")
        return ()


def _log_ready(settings: PlannerSettings, claim: SocketClaim, version: str, metrics_url: str) -> None:
    facts = {
        "event": "ready",
        "socket": str(claim.path),
        "ring_dir": str(settings.ring_dir),
        "metrics_url": metrics_url,
        "version": version,
        "pid": os.getpid(),
    }
    message = "ready: version %s serves unix:%s, regions in %s, metrics at %s"
    _logger.info(message, version, claim.path, settings.ring_dir, metrics_url, extra=facts)

"""The engine as a process: its address, its metrics, its health, and how it starts and ends."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server

from engine_service.address import bind_address
from engine_service.config import EngineSettings, set_thread_defaults
from engine_service.errors import EngineError, ListenError
from engine_service.ledger import deliver_directly
from engine_service.logs import configure_logs
from engine_service.rpc import SERVICE_NAME, InferenceServicer
from engine_service.version import read_version
from engine_service.vllm_setup import build_vllm_servicer, is_vllm_api_served
from engine_service.waiting import call_soon, run_in_thread, wait_for_first
from planner_service.client import ClientError, InvalidOptionsError
from ringplan.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from engine_service.assembly import AssembledEngine

# What is being done, and how far it is, 0 to 1.
OnProgress = Callable[[str, float], None]

EXIT_OK = 0
EXIT_FAILED = 1
_SERVER_OPTIONS = (
    # Room for a prompt of millions of tokens; a larger message would hold up the other calls while it is parsed.
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", -1),
    # Without this a second engine would silently share the port with the first.
    ("grpc.so_reuseport", 0),
)
# How long answers that are complete may take to reach their callers.
_STOP_SECONDS = 2.0
# A health service name for liveness probes: it says SERVING as long as this process answers, also without a planner and
# while the last requests end. A restart would help in neither case.
LIVENESS_SERVICE = "liveness"

_logger = logging.getLogger(__name__)


def run(settings: EngineSettings, *, on_progress: OnProgress | None = None) -> int:
    """Serves until SIGTERM or SIGINT. A second signal ends it without waiting for running requests.

    Args:
        settings: what the engine is to be.
        on_progress: told what is being loaded and how far it is, from 0 to 1, in another thread.

    Returns:
        The process's exit code: 0 after a signal, 1 if the engine cannot start or has failed.
    """
    configure_logs(settings.log_level, as_json=settings.log_json)
    set_thread_defaults()
    try:
        exit_code = asyncio.run(_serve(settings, on_progress or _LoggedProgress()))
    except (EngineError, ClientError, InvalidOptionsError) as error:
        _logger.critical("the engine cannot start: %s", error)
        return EXIT_FAILED
    if exit_code is None:
        # The loading thread is deep in torch: an orderly end of the interpreter would wait for it or crash over it.
        logging.shutdown()
        os._exit(EXIT_OK)
    return exit_code


class _LoggedProgress:
    """Logs each stage of loading once; used by the loading thread."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, _share: float) -> None:
        if stage != self._stage:
            self._stage = stage
            _logger.info("model: %s", stage)


class _Signals:
    """The signals that ask the process to end: the first to end in peace, the second to end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count, number)

    def _count(self, number: signal.Signals) -> None:
        _logger.info("got %s", number.name)
        (self.second if self.first.is_set() else self.first).set()


class _Health:
    """What the health service says; may be told from any thread.

    Args:
        server: serves it.
        services: the names of the services whose health it tells.

    Attributes:
        is_ready: whether it says that the engine serves.
    """

    def __init__(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        self.is_ready = False
        self._services = services
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # The stubs lack it.
        self._loop = asyncio.get_running_loop()
        self._is_ending = False
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_alive(self) -> None:
        """Says that the process lives, from now to its end."""
        await self._servicer.set(LIVENESS_SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def set(self, is_ready: bool) -> None:
        """Says whether the engine serves."""
        status = health_pb2.HealthCheckResponse
        self.is_ready = is_ready and not self._is_ending
        for service in (health.OVERALL_HEALTH, *self._services):
            await self._servicer.set(service, status.SERVING if self.is_ready else status.NOT_SERVING)

    def set_from_thread(self, is_ready: bool) -> None:
        """Says whether the engine serves."""
        asyncio.run_coroutine_threadsafe(self.set(is_ready), self._loop)

    async def end(self) -> None:
        """Says that the engine does not serve, whatever comes."""
        self._is_ending = True
        await self.set(False)


async def _serve(settings: EngineSettings, on_progress: OnProgress) -> int | None:
    """Starts everything, waits for a signal or a failure, and ends everything.

    Returns:
        The exit code, or None if a signal came while the model was being loaded.
    """
    signals = _Signals()
    services = _list_services(settings)
    registry = CollectorRegistry()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # It has no annotations.
    ProcessCollector(registry=registry)
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    # Addresses come first: loading takes long, and one that is taken should be told at once.
    address = bind_address(settings.listen, server.add_insecure_port)
    async with _serve_metrics(settings, registry) as metrics_url:
        health_service = _Health(server, services)
        await health_service.set(False)
        await health_service.set_alive()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def assemble() -> "AssembledEngine":
            # torch and transformers take seconds to import: the process has its addresses and hears signals before.
            from engine_service.assembly import assemble_engine  # noqa: PLC0415  # For the reason above.

            return assemble_engine(
                settings,
                registry,
                deliver=lambda events: call_soon(loop, deliver_directly, events),
                on_ready_changed=health_service.set_from_thread,
                on_ended=lambda: call_soon(loop, ended.set),
                on_progress=on_progress,
            )

        loading = run_in_thread(assemble)
        await wait_for_first(loading, signals.first)
        if not loading.done():
            return None
        assembled = loading.result()
        servicer = InferenceServicer(
            assembled.engine, assembled.loaded.tokenizer, _build_model_info(assembled, settings)
        )
        server.add_generic_rpc_handlers((servicer.build_handler(),))
        if len(services) > 1:
            vllm = build_vllm_servicer(assembled, settings, read_version(), lambda: health_service.is_ready)
            server.add_generic_rpc_handlers((vllm.build_handler(),))
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        assembled.engine.start()
        await server.start()
        _log_ready(assembled, address, metrics_url)
        await wait_for_first(signals.first, ended)
        await health_service.end()
        await _end_requests(settings, assembled, signals)
        await server.stop(_STOP_SECONDS)
    if assembled.engine.failure is not None:
        return EXIT_FAILED
    _logger.info("stopped")
    return EXIT_OK


def _list_services(settings: EngineSettings) -> list[str]:
    """Returns the names of the services: our own, and vLLM's engine API where it is served."""
    if not is_vllm_api_served(settings.vllm_api):
        return [SERVICE_NAME]
    # The package that it needs may be missing.
    from engine_service.vllm_rpc import SERVICE_NAME as VLLM_SERVICE_NAME  # noqa: PLC0415

    return [SERVICE_NAME, VLLM_SERVICE_NAME]


async def _end_requests(settings: EngineSettings, assembled: "AssembledEngine", signals: _Signals) -> None:
    """Lets unfinished requests end by themselves for a while, then aborts them."""
    engine = assembled.engine
    engine.stop_accepting()
    finished = run_in_thread(lambda: engine.wait_until_finished(settings.shutdown_grace_seconds))
    await wait_for_first(finished, signals.second)
    # The engine's thread ends after the step it is in; its events need this loop meanwhile.
    await run_in_thread(engine.stop)
    await asyncio.sleep(0)


@asynccontextmanager
async def _serve_metrics(settings: EngineSettings, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves metrics over HTTP, from threads of its own; yields their address."""
    host = settings.metrics_host
    try:
        httpd, thread = start_http_server(settings.metrics_port, host, registry)
    except OSError as error:
        raise ListenError(f"{host}:{settings.metrics_port}", error.strerror or str(error)) from error
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{httpd.server_port}/metrics"
    finally:
        await asyncio.to_thread(httpd.shutdown)
        httpd.server_close()
        thread.join()


def _build_model_info(assembled: "AssembledEngine", settings: EngineSettings) -> inference_pb2.GetModelInfoResponse:
    loaded, limits = assembled.loaded, assembled.engine.limits
    return inference_pb2.GetModelInfoResponse(
        model=loaded.name,
        architecture=loaded.architecture,
        max_context_tokens=loaded.max_context_tokens,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        has_chat_template=loaded.tokenizer.has_chat_template,
        page_size=settings.page_size,
        num_pages=limits.num_pages,
        server_version=read_version(),
    )


def _log_ready(assembled: "AssembledEngine", address: str, metrics_url: str) -> None:
    limits = assembled.engine.limits
    facts = {
        "event": "ready",
        "address": address,
        "metrics_url": metrics_url,
        "model": assembled.loaded.name,
        "version": read_version(),
        "pid": os.getpid(),
    }
    message = "ready: version %s serves %s at %s, %d pages of %d tokens, metrics at %s"
    values = (read_version(), assembled.loaded.name, address, limits.num_pages, limits.page_size, metrics_url)
    _logger.info(message, *values, extra=facts)

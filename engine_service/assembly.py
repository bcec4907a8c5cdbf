"""Puts an engine together from its settings: model, KV cache, planner session, loop."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from engine_service.answer import AnswerBuilder
from engine_service.attention_choice import choose_attention_backend
from engine_service.config import EngineSettings, GuidancePlan, PlanCacheMode
from engine_service.cuda_graphs import CudaCapturer
from engine_service.detokenizer import IncrementalDetokenizer
from engine_service.device_setup import (
    build_plan_copies,
    capture_decode_steps,
    choose_device,
    measure_step_bytes,
)
from engine_service.engine import Engine
from engine_service.executor import ModelExecutor
from engine_service.kv_sizing import MIN_PAGES, choose_num_pages, find_available_bytes
from engine_service.ledger import Deliver, RequestLedger
from engine_service.loop import EngineLoop
from engine_service.metrics import EngineMetrics
from engine_service.model_cache import ModelCache
from engine_service.model_loading import LoadedModel, OnProgress, load_model
from engine_service.model_runner import ModelRunner
from engine_service.plan_copies import PlanCopies
from engine_service.plan_pipeline import choose_ring_depth
from engine_service.planner_link import PlannerLink
from engine_service.request import Request
from engine_service.scheduler import Scheduler
from engine_service.step_layout import LayoutOptions
from engine_service.validation import EngineLimits
from engine_service.version import read_version
from engine_service.warm_up import warm_up
from planner_service.client import CacheMode

_CACHE_MODES: dict[PlanCacheMode, CacheMode | None] = {
    PlanCacheMode.PLANNER_DEFAULT: None,
    PlanCacheMode.OFF: CacheMode.OFF,
    PlanCacheMode.ON: CacheMode.ON,
    PlanCacheMode.VERIFY: CacheMode.VERIFY,
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine that is ready to start, and the model it runs."""

    engine: Engine
    loaded: LoadedModel


def assemble_engine(
    settings: EngineSettings,
    registry: CollectorRegistry,
    *,
    deliver: Deliver,
    on_ready_changed: Callable[[bool], None],
    on_ended: Callable[[], None],
    on_progress: OnProgress | None = None,
) -> AssembledEngine:
    """Loads the model, opens a session with the planner and puts the engine together.

    Args:
        settings: what the engine is to be.
        registry: where its metrics are declared.
        deliver: takes events in the engine's thread.
        on_ready_changed: told in the engine's thread whether the engine has a planner.
        on_ended: told in the engine's thread that it has ended.
        on_progress: told how far loading is.

    Raises:
        ModelError: the model cannot be loaded, or the KV cache does not fit.
        PlannerUnavailableError: there is no planner.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    cache = ModelCache(settings.model_cache_dir.expanduser()) if settings.model_cache else None
    device = choose_device(settings.device)
    loaded = load_model(settings.model, dtype=settings.dtype, device=str(device), cache=cache, on_progress=on_progress)
    if settings.pack_weights:
        num_packed = loaded.pack_weights()
        _logger.info("%d linear layers have packed weights", num_packed)
    metrics = EngineMetrics(registry)
    metrics.describe_engine(
        version=read_version(),
        model=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
    )
    copies = build_plan_copies(
        loaded.device,
        pins=settings.pin_regions,
        timeout_seconds=settings.plan_timeout_seconds,
        on_pinned_changed=metrics.region_pinned,
    )
    runner = _build_runner(settings, loaded, copies, metrics)
    warm_up(runner, settings.max_step_tokens)
    if settings.cuda_graphs and copies is not None:
        capture_decode_steps(
            runner,
            CudaCapturer(loaded.device),
            max_running_requests=settings.max_running_requests,
            on_decode=metrics.decode_graphed,
        )
    planner = PlannerLink(
        settings.planner,
        page_size=settings.page_size,
        num_pages=runner.num_pages,
        max_running_requests=settings.max_running_requests,
        ring_depth=settings.ring_depth or choose_ring_depth(settings.plan_ahead),
        cache_mode=_CACHE_MODES[settings.cache_mode],
        engine_name=settings.engine_name,
        plan_ahead=settings.plan_ahead,
        plan_timeout_seconds=settings.plan_timeout_seconds,
        copies=copies,
    )
    planner.connect(settings.planner_connect_timeout_seconds)
    _logger.info("session %s with the planner at %s", planner.session.name, settings.planner)
    limits = EngineLimits(
        vocab_size=loaded.vocab_size,
        max_context_tokens=loaded.max_context_tokens,
        page_size=settings.page_size,
        num_pages=runner.num_pages,
        default_max_tokens=settings.default_max_tokens,
    )

    def open_answer(request: Request) -> AnswerBuilder:
        detokenizer = IncrementalDetokenizer(loaded.tokenizer, request.spec.prompt_token_ids)
        return AnswerBuilder(request, detokenizer, loaded.eos_token_ids)

    ledger = RequestLedger(time.monotonic, metrics, open_answer, deliver)
    loop = EngineLoop(
        Scheduler(limits, settings.max_running_requests, settings.max_step_tokens),
        planner,
        ModelExecutor(runner, loaded.vocab_size, loaded.eos_token_ids),
        ledger,
        metrics,
        layout_options=LayoutOptions(
            pads_decode_batches=settings.pad_decode_batches,
            combines_guidance=settings.guidance_plan is GuidancePlan.COMBINED,
        ),
        on_ready_changed=on_ready_changed,
    )
    engine = Engine(
        limits,
        loop,
        ledger,
        metrics,
        max_running_requests=settings.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
        on_ended=on_ended,
    )
    return AssembledEngine(engine, loaded)


def _build_runner(
    settings: EngineSettings, loaded: LoadedModel, copies: PlanCopies | None, metrics: EngineMetrics
) -> ModelRunner:
    page_size = settings.page_size
    backend = choose_attention_backend(
        settings.attention_backend,
        loaded,
        page_size=page_size,
        workspace_bytes=settings.flashinfer_workspace_bytes,
        observer=metrics,
        verifies=settings.cache_mode is PlanCacheMode.VERIFY,
    )
    available_bytes = find_available_bytes(loaded.device)
    if copies is not None and not settings.num_pages:
        step_bytes = measure_step_bytes(
            ModelRunner(loaded, num_pages=MIN_PAGES, page_size=page_size, backend=backend, copies=copies),
            max_step_tokens=settings.max_step_tokens,
            max_running_requests=settings.max_running_requests,
        )
        available_bytes = max(find_available_bytes(loaded.device) - step_bytes, 0)
    # The sink page, and every request that may run at its longest.
    max_useful_pages = 1 + settings.max_running_requests * -(-loaded.max_context_tokens // page_size)
    num_pages = choose_num_pages(
        loaded.kv_shape.bytes_per_page(page_size),
        page_size=page_size,
        available_bytes=available_bytes,
        num_pages=settings.num_pages,
        memory_share=settings.memory_share,
        max_useful_pages=max_useful_pages,
    )
    return ModelRunner(loaded, num_pages=num_pages, page_size=page_size, backend=backend, copies=copies)

"""Puts an engine together from its settings: model, KV cache, planner session, loop."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from engine_service.answer import AnswerBuilder
from engine_service.config import EngineSettings, GuidancePlan, PlanCacheMode
from engine_service.detokenizer import IncrementalDetokenizer
from engine_service.engine import Engine
from engine_service.executor import ModelExecutor
from engine_service.kv_sizing import choose_num_pages, find_available_bytes
from engine_service.ledger import Deliver, RequestLedger
from engine_service.loop import EngineLoop
from engine_service.metrics import EngineMetrics
from engine_service.model_cache import ModelCache
from engine_service.model_loading import LoadedModel, OnProgress, load_model
from engine_service.model_runner import ModelRunner
from engine_service.packed_weights import pack_weights
from engine_service.plan_pipeline import choose_ring_depth
from engine_service.planner_link import PlannerLink
from engine_service.request import Request
from engine_service.scheduler import Scheduler
from engine_service.step_layout import LayoutOptions
from engine_service.validation import EngineLimits
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
    loaded = load_model(settings.model, dtype=settings.dtype, cache=cache, on_progress=on_progress)
    if settings.pack_weights:
        num_packed = pack_weights(loaded.model)
        _logger.info("%d linear layers have packed weights", num_packed)
    num_pages = _choose_num_pages(settings, loaded)
    runner = ModelRunner(loaded, num_pages=num_pages, page_size=settings.page_size)
    warm_up(runner, settings.max_step_tokens)
    planner = PlannerLink(
        settings.planner,
        page_size=settings.page_size,
        num_pages=num_pages,
        max_running_requests=settings.max_running_requests,
        ring_depth=settings.ring_depth or choose_ring_depth(settings.plan_ahead),
        cache_mode=_CACHE_MODES[settings.cache_mode],
        engine_name=settings.engine_name,
        plan_ahead=settings.plan_ahead,
        plan_timeout_seconds=settings.plan_timeout_seconds,
    )
    planner.connect(settings.planner_connect_timeout_seconds)
    _logger.info("session %s with the planner at %s", planner.session.name, settings.planner)
    limits = EngineLimits(
        vocab_size=loaded.vocab_size,
        max_context_tokens=loaded.max_context_tokens,
        page_size=settings.page_size,
        num_pages=num_pages,
        default_max_tokens=settings.default_max_tokens,
    )

    def open_answer(request: Request) -> AnswerBuilder:
        detokenizer = IncrementalDetokenizer(loaded.tokenizer, request.spec.prompt_token_ids)
        return AnswerBuilder(request, detokenizer, loaded.eos_token_ids)

    metrics = EngineMetrics(registry)
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


def _choose_num_pages(settings: EngineSettings, loaded: LoadedModel) -> int:
    # The sink page, and every request that may run at its longest.
    max_useful_pages = 1 + settings.max_running_requests * -(-loaded.max_context_tokens // settings.page_size)
    return choose_num_pages(
        loaded.kv_shape.bytes_per_page(settings.page_size),
        page_size=settings.page_size,
        available_bytes=find_available_bytes(loaded.device),
        num_pages=settings.num_pages,
        memory_share=settings.memory_share,
        max_useful_pages=max_useful_pages,
    )

"""Every metric of the engine, declared on a registry that is passed in."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine_service.request import FinishReason

FINISH_REASONS = (*(reason.value for reason in FinishReason), "error")
PLAN_READINESS = ("ready", "waited")
SCHEDULE_OUTCOMES = ("planned", "skipped", "verified")

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LONG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PLAN_WAIT_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0, 10.0)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class EngineMetrics:
    """The engine's metrics.

    Args:
        registry: where they are declared.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("version", "model", "dtype", "device")
        meaning = "1; the engine's version, and which model it runs in which type and where."
        self._info = Gauge("ringplan_engine_info", meaning, labels, registry=registry)
        self._declare_requests(registry)
        self._declare_steps(registry)
        self._declare_planner(registry)
        self._declare_schedules(registry)
        self._declare_device(registry)

    def _declare_requests(self, registry: CollectorRegistry) -> None:
        self._time_to_first_token = Histogram(
            "ringplan_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._inter_token_latency = Histogram(
            "ringplan_inter_token_latency_seconds",
            "Time between two tokens of a request.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._request_duration = Histogram(
            "ringplan_request_duration_seconds",
            "Time from a request's arrival to its end.",
            buckets=_LONG_BUCKETS,
            registry=registry,
        )
        self._queue_time = Histogram(
            "ringplan_request_queue_seconds",
            "Time from a request's arrival to its first step.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._running = Gauge("ringplan_requests_running", "Requests that hold pages.", registry=registry)
        self._waiting = Gauge("ringplan_requests_waiting", "Requests that wait for room.", registry=registry)
        self._prompt_tokens = Counter(
            "ringplan_prompt_tokens", "Tokens of the prompts of requests that had a first token.", registry=registry
        )
        self._generation_tokens = Counter("ringplan_generation_tokens", "Tokens generated.", registry=registry)
        self._finished = Counter(
            "ringplan_requests_finished", "Requests that ended, by reason.", ["reason"], registry=registry
        )
        for reason in FINISH_REASONS:
            self._finished.labels(reason)
        self._refused = Counter(
            "ringplan_requests_refused", "Requests refused because the queue was full.", registry=registry
        )
        self._preemptions = Counter(
            "ringplan_preemptions", "Times a running request was put back, its pages taken.", registry=registry
        )

    def _declare_steps(self, registry: CollectorRegistry) -> None:
        self._kv_cache_usage = Gauge(
            "ringplan_kv_cache_usage_ratio", "Share of the KV cache's pages that requests hold.", registry=registry
        )
        self._step_rows = Histogram(
            "ringplan_step_rows", "Requests in a step.", buckets=_ROW_BUCKETS, registry=registry
        )
        self._padding_rows = Counter(
            "ringplan_padding_rows", "Rows that brought decode batches to their size.", registry=registry
        )
        self._step_duration = Histogram(
            "ringplan_step_duration_seconds",
            "Time of a step's forward and sampling.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._steps_failed = Counter("ringplan_steps_failed", "Steps that failed.", registry=registry)

    def _declare_planner(self, registry: CollectorRegistry) -> None:
        self._plan_wait = Histogram(
            "ringplan_plan_wait_seconds",
            "Time the engine's thread spent on getting a step's plan.",
            buckets=_PLAN_WAIT_BUCKETS,
            registry=registry,
        )
        self._plans_taken = Counter(
            "ringplan_plans_taken",
            "Plans taken for a step, by whether they were ready when it began or had to be waited for.",
            ["readiness"],
            registry=registry,
        )
        for readiness in PLAN_READINESS:
            self._plans_taken.labels(readiness)
        self._planner_connected = Gauge(
            "ringplan_planner_connected", "Whether the engine has a session with the planner.", registry=registry
        )
        self._planner_lost = Counter(
            "ringplan_planner_lost", "Times the session with the planner was lost.", registry=registry
        )
        self._planner_reconnects = Counter(
            "ringplan_planner_reconnects", "Times there was a new session after a lost one.", registry=registry
        )

    def _declare_schedules(self, registry: CollectorRegistry) -> None:
        self._schedules = Counter(
            "ringplan_attention_plans",
            "Schedules that FlashInfer needed for a plan label of a step: made (planned), saved because an earlier one "
            "served (skipped), or made only to compare it with the earlier one (verified).",
            ["outcome"],
            registry=registry,
        )
        for outcome in SCHEDULE_OUTCOMES:
            self._schedules.labels(outcome)
        self._schedule_mismatches = Counter(
            "ringplan_attention_plan_mismatches",
            "FlashInfer schedules of an earlier step that differed from a fresh one where they should not.",
            registry=registry,
        )

    def _declare_device(self, registry: CollectorRegistry) -> None:
        self._region_pinned = Gauge(
            "ringplan_region_pinned",
            "Whether the ring's memory is registered with CUDA; 0 on a CPU, and where CUDA refused.",
            registry=registry,
        )
        self._graph_replays = Counter(
            "ringplan_cuda_graph_replays", "Decode steps that were replayed as a CUDA graph.", registry=registry
        )
        self._graph_misses = Counter(
            "ringplan_cuda_graph_misses",
            "Decode steps with CUDA graphs on that had none of their size: the first of its kind, which is captured, "
            "and every one after a failed capture.",
            registry=registry,
        )

    def describe_engine(self, *, version: str, model: str, dtype: str, device: str) -> None:
        """Says what runs: the engine's version, the model's name, its type such as "float32", and where it is."""
        self._info.labels(version, model, dtype, device).set(1)

    def load_changed(self, num_running: int, num_waiting: int, kv_cache_usage: float) -> None:
        """Sets how much there is to do and how full the KV cache is, as a share from 0 to 1."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_cache_usage.set(kv_cache_usage)

    def request_refused(self) -> None:
        """Counts a request that found the queue full."""
        self._refused.inc()

    def request_started(self, queue_seconds: float) -> None:
        """Counts a request's first step."""
        self._queue_time.observe(queue_seconds)

    def first_token_generated(self, seconds: float, num_prompt_tokens: int) -> None:
        """Counts a request's first token, so many seconds after its arrival."""
        self._time_to_first_token.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc()

    def next_token_generated(self, seconds: float) -> None:
        """Counts another token of a request, so many seconds after the one before."""
        self._inter_token_latency.observe(seconds)
        self._generation_tokens.inc()

    def request_finished(self, reason: str, seconds: float) -> None:
        """Counts a request that ended, for one of `FINISH_REASONS`, so many seconds after its arrival."""
        self._finished.labels(reason).inc()
        self._request_duration.observe(seconds)

    def request_preempted(self) -> None:
        """Counts a running request that was put back."""
        self._preemptions.inc()

    def plan_received(self, seconds: float, *, was_ready: bool) -> None:
        """Counts a plan, whether it was ready when asked for, and the time the engine's thread spent on getting it."""
        self._plan_wait.observe(seconds)
        self._plans_taken.labels(PLAN_READINESS[not was_ready]).inc()

    def step_completed(self, num_rows: int, num_padding_rows: int, seconds: float) -> None:
        """Counts a step that has run, of so many requests, with so many padding rows over its plan labels."""
        self._step_rows.observe(num_rows)
        self._padding_rows.inc(num_padding_rows)
        self._step_duration.observe(seconds)

    def step_failed(self) -> None:
        """Counts a step that failed."""
        self._steps_failed.inc()

    def schedule_made(self) -> None:
        """Counts a schedule of the attention backend that was made for a plan label of a step."""
        self._schedules.labels("planned").inc()

    def schedule_kept(self) -> None:
        """Counts one that was saved: an earlier step's served."""
        self._schedules.labels("skipped").inc()

    def schedule_verified(self, *, is_equal: bool) -> None:
        """Counts one that was made to be compared with an earlier step's, and whether they were equal."""
        self._schedules.labels("verified").inc()
        if not is_equal:
            self._schedule_mismatches.inc()

    def region_pinned(self, is_pinned: bool) -> None:
        """Notes whether the ring's memory is registered with CUDA."""
        self._region_pinned.set(is_pinned)

    def decode_graphed(self, was_replayed: bool) -> None:
        """Counts a decode step where CUDA graphs are on, and whether it was replayed as one."""
        (self._graph_replays if was_replayed else self._graph_misses).inc()

    def planner_connected(self) -> None:
        """Notes that there is a session with the planner."""
        self._planner_connected.set(1)

    def planner_lost(self) -> None:
        """Notes that the session with the planner was lost."""
        self._planner_connected.set(0)
        self._planner_lost.inc()

    def planner_reconnected(self) -> None:
        """Counts a new session after a lost one."""
        self._planner_reconnects.inc()

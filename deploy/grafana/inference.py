"""The dashboard "Inference": what callers get from the engines, and why it may be slow."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import dashboard, units

from deploy.grafana.engine_rows import PLANS, PROCESSES, STEPS
from deploy.grafana.panels import (
    BLUE,
    GREEN,
    QUANTILES,
    RED,
    TOKENS_PER_SECOND,
    YELLOW,
    Limit,
    Limits,
    Query,
    Row,
    bad_from,
    build_dashboard,
    build_graph,
    build_stat,
    describe,
)
from deploy.grafana.queries import PODS, gauge, quantile, rate, share

TITLE = "Inference"
UID = "ringplan-inference"
DESCRIPTION = (
    "What Ringplan's engines give their callers: latency, throughput, queue, batches, and how often they wait for "
    "plans. What each alert means stands in docs/runbook.md."
)
FAILED = f'{PODS},reason="error"'


GLANCE = Row(
    "At a glance",
    [
        build_stat(
            "Time to first token, p95",
            describe(
                "19 of 20 requests had their first token within this time.",
                "see *Queue time*: if it rose as well, requests wait for room, so add replicas; if not, prompts are "
                "long or steps are slow, see *Step duration*.",
            ),
            units.Seconds,
            Query(quantile(0.95, "ringplan_time_to_first_token_seconds", PODS), "p95"),
            bad_from(1, 5),
            empty="no requests",
        ),
        build_stat(
            "Inter-token latency, p95",
            describe(
                "19 of 20 tokens came within this time after the one before.",
                "larger batches and long prompts between decode steps make it rise: see *Rows a step*, and lower "
                "`--max-running-requests` or `--max-step-tokens`.",
            ),
            units.Seconds,
            Query(quantile(0.95, "ringplan_inter_token_latency_seconds", PODS), "p95"),
            bad_from(0.1, 0.5),
            empty="no tokens",
        ),
        build_stat(
            "Tokens generated",
            describe(
                "Tokens a second, of all engines chosen.",
                "none while requests run: the engines hang, see *Planner connection* and their logs.",
            ),
            TOKENS_PER_SECOND,
            Query(rate("ringplan_generation_tokens_total", PODS), "tokens"),
            Limits(BLUE),
        ).decimals(0),
        build_stat(
            "Requests waiting",
            describe(
                "Requests that wait for room in a batch.",
                "a queue that does not empty means too few replicas, or a KV cache too small for the contexts: see "
                "*KV cache usage*.",
            ),
            units.Short,
            Query(gauge("ringplan_requests_waiting", PODS), "waiting"),
            bad_from(10, 100),
            width=3,
        ),
        build_stat(
            "KV cache usage, max",
            describe(
                "Share of the pages that requests hold, in the engine that is fullest.",
                "near 1 requests are put back and computed again: see *Preemptions*, and raise `--num-pages` or "
                "`--memory-share`.",
            ),
            units.PercentUnit,
            Query(gauge("ringplan_kv_cache_usage_ratio", PODS, how="max"), "usage"),
            bad_from(0.9, 0.98),
            width=3,
        ),
        build_stat(
            "Failed requests",
            describe(
                "Share of the requests that ended which ended with an error of the engine's.",
                "the engine's log names the error of each; failed steps and lost planners are the usual reasons.",
            ),
            units.PercentUnit,
            Query(
                share(rate("ringplan_requests_finished_total", FAILED), rate("ringplan_requests_finished_total", PODS)),
                "failed",
            ),
            bad_from(0.001, 0.01),
            width=3,
            empty="no requests",
        ),
        build_stat(
            "Planner connection",
            describe(
                "Whether every engine chosen has a session with its planner.",
                "an engine without its planner answers nothing new until it is back; it tries by itself. See whether "
                "the planner runs (`ringplan health unix:/run/ringplan/planner.sock`), then both logs.",
            ),
            units.NoUnit,
            Query(gauge("ringplan_planner_connected", PODS, how="min"), "connected"),
            Limits(RED, (Limit(1, GREEN),)),
            width=3,
            words={"lost": Limit(0, RED), "connected": Limit(1, GREEN)},
        ),
    ],
)


def _build_quantiles(title: str, histogram: str, shows: str, remedy: str) -> timeseries.Panel:
    queries = [Query(quantile(rank, histogram, PODS), f"p{rank * 100:g}") for rank in QUANTILES]
    return build_graph(title, describe(shows, remedy), units.Seconds, queries, width=12)


LATENCY = Row(
    "Latency",
    [
        _build_quantiles(
            "Time to first token",
            "ringplan_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            "if *Queue time* shows the same, requests wait for room: add replicas. If not, prompts are long, or "
            "steps slow.",
        ),
        _build_quantiles(
            "Inter-token latency",
            "ringplan_inter_token_latency_seconds",
            "Between two tokens of a request.",
            "p99 far above p50: long prompts run between decode steps, lower `--max-step-tokens`. All high: batches "
            "are large, or plans are waited for, see *Plan wait*.",
        ),
        _build_quantiles(
            "Request duration",
            "ringplan_request_duration_seconds",
            "From a request's arrival to its end.",
            "it follows the answers' lengths; if those did not change, one of the other three latencies did.",
        ),
        _build_quantiles(
            "Queue time",
            "ringplan_request_queue_seconds",
            "From a request's arrival to its first step.",
            "seconds mean that the batch or the KV cache is full: add replicas, or raise `--max-running-requests` "
            "where *KV cache usage* leaves room.",
        ),
    ],
)


LOAD = Row(
    "Load",
    [
        build_graph(
            "Tokens",
            describe(
                "Prompt tokens of requests that had a first token, and tokens generated, a second.",
                "generation falls while requests run: see *Step duration* and *Plan wait*. Prompt far above "
                "generation is a load of long prompts: latency of others rises with it.",
            ),
            TOKENS_PER_SECOND,
            [
                Query(rate("ringplan_prompt_tokens_total", PODS), "prompt"),
                Query(rate("ringplan_generation_tokens_total", PODS), "generation"),
            ],
        ),
        build_graph(
            "Requests ended by reason",
            describe(
                "Requests a second that ended, and why: `stop` and `length` are good ends, `abort` is the caller's, "
                "`error` ours.",
                "`error`: the engine's log names each. Many `abort`: callers give up, look at latency; mostly "
                "`length`: answers are cut off by `max_tokens`.",
            ),
            units.RequestsPerSecond,
            [Query(rate("ringplan_requests_finished_total", PODS, "reason"), "{{reason}}")],
            style="stacked",
        ),
        build_graph(
            "Requests running and waiting",
            describe(
                "Requests that hold pages, and those that wait for room.",
                "waiting grows while running is below `--max-running-requests`: the KV cache is full. Running at "
                "that limit: add replicas, the autoscaler counts the waiting.",
            ),
            units.Short,
            [
                Query(gauge("ringplan_requests_running", PODS, "pod"), "{{pod}} running"),
                Query(gauge("ringplan_requests_waiting", PODS, "pod"), "{{pod}} waiting"),
            ],
        ),
        build_graph(
            "KV cache usage",
            describe(
                "Share of each engine's pages that requests hold.",
                "one engine full and others not: balance by load, not by connection. All full: more memory or more "
                "replicas.",
            ),
            units.PercentUnit,
            [Query(gauge("ringplan_kv_cache_usage_ratio", PODS, "pod", how="max"), "{{pod}}")],
            maximum=1,
            limits=Limits(GREEN, (Limit(0.9, YELLOW), Limit(0.98, RED))),
        ),
        build_graph(
            "Preemptions",
            describe(
                "Times a second that a running request was put back, its pages taken; it is computed again later.",
                "now and then is normal with a full cache. Steady preemption wastes work: lower "
                "`--max-running-requests` or give the KV cache more memory.",
            ),
            units.OpsPerSecond,
            [Query(rate("ringplan_preemptions_total", PODS, "pod"), "{{pod}}")],
        ),
        build_graph(
            "Requests refused",
            describe(
                "Requests a second refused because the queue was full.",
                "callers should come back later or elsewhere: add replicas, or raise `--max-queued-requests` if "
                "waiting longer is better than a refusal.",
            ),
            units.RequestsPerSecond,
            [Query(rate("ringplan_requests_refused_total", PODS, "pod"), "{{pod}}")],
        ),
    ],
)


def build() -> dashboard.Dashboard:
    """Returns the dashboard."""
    return build_dashboard(TITLE, UID, DESCRIPTION, [GLANCE, LATENCY, LOAD, STEPS, PLANS, PROCESSES])

"""The lower rows of "Inference": steps, plans, processes."""

from grafana_foundation_sdk.models import units

from deploy.grafana.panels import QUANTILES, Query, Row, build_graph, build_names, describe
from deploy.grafana.queries import PODS, SESSIONS, gauge, hit_ratio, increase, mean, quantile, rate, share

PADDING_ROWS = rate("ringplan_padding_rows_total", PODS)
REAL_ROWS = rate("ringplan_step_rows_sum", PODS)
PLANS_READY = rate("ringplan_plans_taken_total", f'{PODS},readiness="ready"')


STEPS = Row(
    "Steps",
    [
        build_graph(
            "Rows a step",
            describe(
                "Requests in a step: mean, p50 and p95.",
                "small batches under a long queue: the KV cache is full. Large ones with a high inter-token latency: "
                "lower `--max-running-requests`.",
            ),
            units.Short,
            [
                Query(mean("ringplan_step_rows", PODS), "mean"),
                *(Query(quantile(rank, "ringplan_step_rows", PODS), f"p{rank * 100:g}") for rank in (0.5, 0.95)),
            ],
            width=6,
        ),
        build_graph(
            "Padding",
            describe(
                "Share of all rows that only pad a decode batch to its bucket size.",
                "near one half, batches mostly lie just above a bucket size: choose `--max-running-requests` at one "
                "(8, 16, 32), or turn padding off on a CPU (`--no-pad-decode-batches`).",
            ),
            units.PercentUnit,
            [Query(share(PADDING_ROWS, f"({PADDING_ROWS} + {REAL_ROWS})"), "padding")],
            width=6,
            maximum=1,
        ),
        build_graph(
            "Step duration",
            describe(
                "Time of a step's forward and sampling.",
                "if it rose with *Rows a step*, that is the batch; if not, the processor or device is shared or "
                "throttled.",
            ),
            units.Seconds,
            [Query(quantile(rank, "ringplan_step_duration_seconds", PODS), f"p{rank * 100:g}") for rank in QUANTILES],
            width=6,
        ),
        build_graph(
            "Steps",
            describe(
                "Steps a second that ran, and that failed.",
                "a failed step ends its requests with an error: the engine's log has the reason. None running while "
                "requests wait: the engine hangs or has no planner.",
            ),
            units.OpsPerSecond,
            [
                Query(rate("ringplan_step_rows_count", PODS), "run"),
                Query(rate("ringplan_steps_failed_total", PODS), "failed"),
            ],
            width=6,
        ),
    ],
)
PLANS = Row(
    "Plans",
    [
        build_graph(
            "Plans ready when needed",
            describe(
                "Share of steps whose plan was there when the step began.",
                "steady decode reaches 0.9; batches that change at every step cannot. If it falls without that, look "
                "at plan latency on the Plan-cache health dashboard.",
            ),
            units.PercentUnit,
            [Query(share(PLANS_READY, rate("ringplan_plans_taken_total", PODS)), "ready")],
            maximum=1,
        ),
        build_graph(
            "Plan wait",
            describe(
                "Time the engine's thread spent on getting a step's plan. Logarithmic.",
                "p50 in tens of microseconds is a plan that was ready. Milliseconds: the planner is short of "
                "processor time, or the ring stalls.",
            ),
            units.Seconds,
            [Query(quantile(rank, "ringplan_plan_wait_seconds", PODS), f"p{rank * 100:g}") for rank in QUANTILES],
            style="log",
        ),
        build_graph(
            "Planner connection by pod",
            describe(
                "1 while an engine has a session with its planner, 0 while not; beside it sessions lost and made "
                "again.",
                "0 for more than some seconds: the planner does not run, see its log. Lost again and again: it is "
                "killed, often for memory.",
            ),
            units.Short,
            [
                Query(gauge("ringplan_planner_connected", PODS, "pod", how="min"), "{{pod}} connected"),
                Query(increase("ringplan_planner_lost_total", PODS), "lost"),
                Query(increase("ringplan_planner_reconnects_total", PODS), "made again"),
            ],
        ),
        build_graph(
            "Plan cache hit ratio by session",
            describe(
                "Share of decode plans that came from the plan cache. Empty with the cache off.",
                "the dashboard Plan-cache health says why.",
            ),
            units.PercentUnit,
            [Query(hit_ratio("pod", "session"), "{{pod}} {{session}}")],
            width=12,
            maximum=1,
        ),
        build_graph(
            "Ring stalls by session",
            describe(
                "Steps a second for which the engine stood still because no buffer set was free.",
                "raise `--ring-depth`; see leases on the dashboard Plan-cache health.",
            ),
            units.OpsPerSecond,
            [
                Query(
                    rate("ringplan_ring_waits_total", f'{SESSIONS},kind="stall"', "pod", "session"),
                    "{{pod}} {{session}}",
                )
            ],
            width=12,
        ),
    ],
)


PROCESSES = Row(
    "Processes",
    [
        build_graph(
            "Engine's processor",
            describe(
                "Cores that the engine processes use.",
                "at the container's limit steps are slow for that reason alone: raise the limit or set "
                "`--num-threads` to it.",
            ),
            units.Short,
            [Query(rate("process_cpu_seconds_total", f'{PODS},job="ringplan",container="engine"', "pod"), "{{pod}}")],
        ),
        build_graph(
            "Memory by process",
            describe(
                "Resident memory of engines and planners.",
                "a line that climbs without end is a leak: note the load and report it. Near the container's limit "
                "the kernel kills the process.",
            ),
            units.BytesIEC,
            [
                Query(
                    gauge("process_resident_memory_bytes", f'{PODS},job="ringplan"', "pod", "container"),
                    "{{pod}} {{container}}",
                )
            ],
        ),
        build_names(
            "Engines",
            describe(
                "Each engine with its version, model, number type and device.",
                "after a rollout all are the same.",
            ),
            Query(
                f"max by (pod, version, model, dtype, device) (ringplan_engine_info{{{PODS}}})",
                "{{pod}} {{version}}: {{model}}, {{dtype}}, {{device}}",
            ),
            width=8,
            height=8,
        ),
    ],
)

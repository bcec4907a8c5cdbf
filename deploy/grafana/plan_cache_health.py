"""The dashboard "Plan-cache health": the planner, for whoever is paged when the plan cache goes bad."""

from grafana_foundation_sdk.models import dashboard, units

from deploy.grafana.panels import (
    BLUE,
    GREEN,
    RED,
    Limit,
    Limits,
    Query,
    Row,
    bad_from,
    build_dashboard,
    build_graph,
    build_stat,
    describe,
    good_from,
)
from deploy.grafana.planner_rows import PAGES, RING, SESSIONS_AND_PROCESSES
from deploy.grafana.queries import PODS, SESSIONS, gauge, hit_ratio, increase, quantile, rate

TITLE = "Plan-cache health"
UID = "ringplan-plan-cache"
DESCRIPTION = (
    "How Ringplan's planners fare: the plan cache, the ring of buffer sets, leases and pages. Start with the top "
    "row; what each alert means stands in docs/runbook.md."
)


GLANCE = Row(
    "At a glance",
    [
        build_stat(
            "Mismatches",
            describe(
                "Cached plans that were wrong, found by the verify mode in the time shown. None of them was served.",
                "even one is a fault of the cache, and pages. Set the engine's cache mode to off (`--cache-mode "
                "off`), take the capture from the planner's capture folder, replay it with `ringplan conformance "
                "CAPTURE`, and report it. If the next figure says that it was injected, it is a drill.",
            ),
            units.Short,
            Query(increase("ringplan_plan_cache_mismatches_total", SESSIONS, window="$__range"), "mismatches"),
            Limits(GREEN, (Limit(0.001, RED),)),
        ).decimals(0),
        build_stat(
            "Injected by drills",
            describe(
                "Mismatches that `ringplan drill mismatch` injected in the time shown, to try the page.",
                "nobody should drill in production without telling; planners without `--allow-drills` refuse.",
            ),
            units.Short,
            Query(increase("ringplan_drills_total", SESSIONS, window="$__range"), "drills"),
            Limits(BLUE),
            width=3,
        ).decimals(0),
        build_stat(
            "Hit ratio, decode plans",
            describe(
                "Share of decode plans that came from the plan cache. Batches of long answers reach 0.9 and more.",
                "see *Misses by reason*: `rows` means batches that change often, which short answers explain, or more "
                "of them in turn than `--cache-entries` keeps; `cold` that often, sessions that begin anew.",
            ),
            units.PercentUnit,
            Query(hit_ratio(), "hit ratio"),
            good_from(0.5, 0.8),
            empty="no decode plans, or cache off",
        ),
        build_stat(
            "Ring stalls",
            describe(
                "Steps a second that found no free buffer set although no plan was ahead: the engine stood still for "
                "them.",
                "the engine releases too late or the ring is too shallow: see *Sets leased against depth*, then "
                "raise `--ring-depth`.",
            ),
            units.OpsPerSecond,
            Query(rate("ringplan_ring_waits_total", f'{SESSIONS},kind="stall"'), "stalls"),
            bad_from(0.01, 1),
            width=3,
        ),
        build_stat(
            "Oldest lease",
            describe(
                "Age of the oldest buffer set that an engine still holds.",
                "a set is held until its step has run, so for as long as the steps planned ahead take, and no "
                "longer. Older ones mean that the engine's thread or its device hangs: see who holds what with "
                "`ringplan inspect SESSION`, then look at that engine's log; a restart of the engine frees all.",
            ),
            units.Seconds,
            Query(gauge("ringplan_ring_oldest_lease_age_seconds", SESSIONS, how="max"), "oldest lease"),
            bad_from(20, 60),
            width=3,
        ),
        build_stat(
            "Free pages, fullest session",
            describe(
                "Share of the pool's pages that nobody holds, in the session that has the fewest.",
                "near zero the engine puts requests back to free pages: see *Preemptions* on the Inference "
                "dashboard, give the KV cache more memory (`--num-pages`, `--memory-share`) or add replicas.",
            ),
            units.PercentUnit,
            Query(f"min(ringplan_pages_free{{{SESSIONS}}} / (ringplan_pages{{{SESSIONS}}} - 1))", "free"),
            good_from(0.02, 0.1),
        ),
        build_stat(
            "Open sessions",
            describe(
                "Engines that have a session with a planner.",
                "none means that no engine is connected: look at *Planner connection* on the Inference dashboard and "
                "at both logs.",
            ),
            units.Short,
            Query(gauge("ringplan_sessions", PODS), "sessions"),
            Limits(RED, (Limit(1, GREEN),)),
            width=3,
        ),
    ],
)


CACHE = Row(
    "Plan cache",
    [
        build_graph(
            "Hit ratio by plan label",
            describe(
                "Share of decode plans, by plan label, that came from the plan cache.",
                "if one label falls and others stay, look at what its requests have in common (guidance, samples); "
                "if all fall, see the reasons beside this.",
            ),
            units.PercentUnit,
            [Query(hit_ratio("plan_label"), "{{plan_label}}")],
            width=12,
            maximum=1,
        ),
        build_graph(
            "Misses by reason",
            describe(
                "Plans a second that were made from scratch, by why the cache had none. `not_decode` is prefill and "
                "no fault.",
                "`rows`, `labels`, `padding`: the batch changes often, or more batches take turns than "
                "`--cache-entries` keeps; `stream_changed`, `discarded`: requests end or are cut back often; `cold`: "
                "the first plan of a session; `fork`: samples and contexts begin.",
            ),
            units.OpsPerSecond,
            [Query(rate("ringplan_plan_cache_misses_total", SESSIONS, "reason"), "{{reason}}")],
            width=12,
            style="stacked",
        ),
        build_graph(
            "Mismatches by plan label",
            describe(
                "Cached plans that were wrong lately, and on top of them how many a drill injected: each is counted "
                "as wrong too.",
                "as for the figure above: cache off, replay the capture, report it. Captures written stand further "
                "down.",
            ),
            units.Short,
            [
                Query(increase("ringplan_plan_cache_mismatches_total", SESSIONS, "plan_label"), "{{plan_label}}"),
                Query(increase("ringplan_drills_total", SESSIONS), "injected by a drill"),
            ],
            style="bars",
        ),
        build_graph(
            "Plan latency by source",
            describe(
                "How long making a plan took, p50 and p99: from scratch (full), from the cache (cached), or both "
                "(verified). Logarithmic.",
                "full plans grow with the pages held, cached ones do not: if cached rises, the planner's processor "
                "is taken by others. See *Planner's processor*, and give it a core of its own.",
            ),
            units.Seconds,
            [
                Query(
                    quantile(rank, "ringplan_plan_duration_seconds", PODS, "source"), f"{{{{source}}}} p{rank * 100:g}"
                )
                for rank in (0.5, 0.99)
            ],
            style="log",
        ),
        build_graph(
            "Plans made by source",
            describe(
                "Plans a second, by how they came to be.",
                "`verified` in production costs both plans each time: it is for finding faults, `--cache-mode on` is "
                "for speed. None at all while requests run: see the engine's log.",
            ),
            units.OpsPerSecond,
            [Query(rate("ringplan_plan_duration_seconds_count", PODS, "source"), "{{source}}")],
            style="stacked",
        ),
    ],
)


def build() -> dashboard.Dashboard:
    """Returns the dashboard."""
    return build_dashboard(TITLE, UID, DESCRIPTION, [GLANCE, CACHE, RING, PAGES, SESSIONS_AND_PROCESSES])

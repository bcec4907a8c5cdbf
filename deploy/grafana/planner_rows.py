"""The lower rows of "Plan-cache health": ring, pages, sessions."""

from grafana_foundation_sdk.models import units

from deploy.grafana.panels import Query, Row, bad_from, build_graph, build_names, describe
from deploy.grafana.queries import PODS, SESSIONS, gauge, increase, quantile, rate

PER_SESSION = "{{pod}} {{session}}"


RING = Row(
    "Ring and leases",
    [
        build_graph(
            "Ring waits by kind",
            describe(
                "Steps a second that waited for a free buffer set: stalls held the engine up, back-pressure only "
                "kept the planner from running further ahead.",
                "back-pressure is normal when planning ahead. Stalls are not: raise `--ring-depth`, or find out why "
                "the engine releases late.",
            ),
            units.OpsPerSecond,
            [Query(rate("ringplan_ring_waits_total", SESSIONS, "kind"), "{{kind}}")],
        ),
        build_graph(
            "Ring wait quantiles",
            describe(
                "How long those steps waited, p50 and p99, by kind. Logarithmic; empty while nothing waits.",
                "a stall as long as a step means one set too few; at `--ring-timeout-seconds` the step fails with "
                "`ring_timeout`.",
            ),
            units.Seconds,
            [
                Query(quantile(rank, "ringplan_ring_wait_seconds", SESSIONS, "kind"), f"{{{{kind}}}} p{rank * 100:g}")
                for rank in (0.5, 0.99)
            ],
            style="log",
        ),
        build_graph(
            "Sets leased against depth",
            describe(
                "Buffer sets that the engine holds, and how many the ring has.",
                "leased at depth for long means that the engine never releases in time: with stalls, raise "
                "`--ring-depth`; with an old lease, the engine hangs.",
            ),
            units.Short,
            [
                Query(gauge("ringplan_ring_sets_leased", SESSIONS, "pod", "session"), f"{PER_SESSION} leased"),
                Query(gauge("ringplan_ring_depth", SESSIONS, "pod", "session"), f"{PER_SESSION} depth"),
            ],
        ),
        build_graph(
            "Oldest lease by session",
            describe(
                "Age of the oldest buffer set each session's engine still holds; 0 without a lease.",
                "a line that climbs at one second a second is a lease that is stuck: `ringplan inspect SESSION` "
                "names the set, the engine's log says what it does.",
            ),
            units.Seconds,
            [
                Query(
                    gauge("ringplan_ring_oldest_lease_age_seconds", SESSIONS, "pod", "session", how="max"), PER_SESSION
                )
            ],
            limits=bad_from(20, 60),
        ),
        build_graph(
            "Step that holds the oldest lease",
            describe(
                "The id of the step whose lease is the oldest; -1 without a lease. Ids rise as steps run.",
                "a flat line while requests run is one and the same step holding its set: take its id to the "
                "engine's log.",
            ),
            units.NoUnit,
            [Query(gauge("ringplan_ring_oldest_lease_step", SESSIONS, "pod", "session", how="max"), PER_SESSION)],
        ).min(-1),
        build_graph(
            "Shared memory",
            describe(
                "Bytes of the rings' regions, and how many of them are locked in memory.",
                "locked below the size: the memory-lock limit of the planner is too low, and copies to a device may "
                "wait for pages to come back from swap. Raise the limit (`ulimit -l`).",
            ),
            units.BytesIEC,
            [
                Query(gauge("ringplan_region_bytes", SESSIONS), "regions"),
                Query(gauge("ringplan_region_locked_bytes", SESSIONS), "locked"),
            ],
        ),
    ],
)


PAGES = Row(
    "Pages and layouts",
    [
        build_graph(
            "Pages",
            describe(
                "Pages of the pools: all, used, and those that more than one stream holds.",
                "used near all: the engine will put requests back. Used that stays up with no request running is a "
                "leak: `ringplan inspect SESSION` lists the streams that hold pages.",
            ),
            units.Short,
            [
                Query(gauge("ringplan_pages", SESSIONS), "all"),
                Query(gauge("ringplan_pages_used", SESSIONS), "used"),
                Query(gauge("ringplan_pages_shared", SESSIONS), "shared"),
                Query(gauge("ringplan_pages_free", SESSIONS), "free"),
            ],
        ),
        build_graph(
            "Layout errors by reason",
            describe(
                "Steps a second that got no plan, by why.",
                "`out_of_pages`: more memory for the KV cache or fewer requests at once; `ring_timeout`: a stuck "
                "lease; `region_unavailable`: the ring's tmpfs is full; `invalid_layout`, `unknown_stream`: a fault "
                "of the engine, report it.",
            ),
            units.OpsPerSecond,
            [Query(rate("ringplan_layout_errors_total", SESSIONS, "reason"), "{{reason}}")],
        ),
        build_graph(
            "Steps discarded and regions grown",
            describe(
                "Planned steps a second that were cut back because the batch changed, and regions that gave way to "
                "larger ones.",
                "many discards beside few plans: `--plan-ahead` is too long for answers this short. Regions growing "
                "again and again: plans get larger without end, look at the streams' lengths.",
            ),
            units.OpsPerSecond,
            [
                Query(rate("ringplan_steps_discarded_total", SESSIONS), "steps discarded"),
                Query(rate("ringplan_regions_grown_total", SESSIONS), "regions grown"),
            ],
        ),
    ],
)


SESSIONS_AND_PROCESSES = Row(
    "Sessions and processes",
    [
        build_graph(
            "Sessions, streams and steps in flight",
            describe(
                "Open sessions, the sequences they hold, and steps planned but neither committed nor discarded.",
                "steps in flight that stay at one number while nothing runs: an engine waits for a plan or hangs. "
                "Sessions that come and go: see the next panel.",
            ),
            units.Short,
            [
                Query(gauge("ringplan_sessions", PODS), "sessions"),
                Query(gauge("ringplan_streams", SESSIONS), "streams"),
                Query(gauge("ringplan_steps_in_flight", SESSIONS), "steps in flight"),
            ],
        ),
        build_graph(
            "Sessions opened, protocol errors, captures",
            describe(
                "Sessions opened, sessions ended for breaking the protocol, and mismatches written as captures.",
                "sessions opened again and again is an engine that restarts or reconnects; protocol errors are a "
                "fault of the engine or of versions that do not fit: compare both versions. Captures wait in the "
                "planner's capture folder.",
            ),
            units.Short,
            [
                Query(increase("ringplan_sessions_opened_total", PODS), "sessions opened"),
                Query(increase("ringplan_protocol_errors_total", PODS), "protocol errors"),
                Query(increase("ringplan_captures_written_total", PODS), "captures written"),
            ],
            style="bars",
        ),
        build_graph(
            "Planner's processor",
            describe(
                "Cores that the planner processes use.",
                "near one core, planning is held up by the planner itself: give it a core of its own and look at "
                "plan latency.",
            ),
            units.Short,
            [Query(rate("process_cpu_seconds_total", f'{PODS},job="ringplan",container="planner"', "pod"), "{{pod}}")],
            width=8,
        ),
        build_names(
            "Who is connected",
            describe(
                "Each open session with its engine's name and cache mode.",
                "`off` makes every plan from scratch, and no hits or misses are counted; `verify` costs both plans.",
            ),
            Query(
                f"max by (pod, session, engine, cache_mode) (ringplan_session_info{{{SESSIONS}}})",
                f"{PER_SESSION}: {{{{engine}}}}, cache {{{{cache_mode}}}}",
            ),
            width=16,
        ),
        build_names(
            "Planner versions",
            describe(
                "The version of each planner.",
                "after a rollout all are the same; an engine and its planner come from one release.",
            ),
            Query(f"max by (pod, version) (ringplan_planner_info{{{PODS}}})", "{{pod}} {{version}}"),
            width=8,
        ),
    ],
)

"""The alerts. Each has a section in docs/runbook.md, and cases in deploy/prometheus/tests."""

from collections.abc import Iterable

from deploy.prometheus.recording_rules import FAST_BURNS, FIRST_TOKEN_OBJECTIVE, FIRST_TOKEN_SECONDS, SLOW_BURNS
from deploy.prometheus.rule import CRITICAL, WARNING, Alert, Group

PLAN_CACHE_DASHBOARD = "ringplan-plan-cache"
INFERENCE_DASHBOARD = "ringplan-inference"

# Fewer requests than that in the long window say too little about the share that was late.
_MIN_REQUESTS = 20
_SECONDS = {"h": 3_600, "d": 86_400}
_OF_SESSION = ("namespace", "pod", "session")
_WHERE = "{{ $labels.namespace }}/{{ $labels.pod }}"

MISMATCH = Alert(
    "RingplanPlanCacheMismatch",
    # The second part: a series that is new, and so never rose from 0 before Prometheus' eyes. The third: the session
    # ended, and took its series with it, before Prometheus saw them.
    """
    sum by (namespace, pod, session, plan_label) (increase(ringplan_plan_cache_mismatches_total[30m])) > 0
    or
    sum by (namespace, pod, session, plan_label) (
      ringplan_plan_cache_mismatches_total unless ringplan_plan_cache_mismatches_total offset 30m
    ) > 0
    or on (namespace, pod)
    sum by (namespace, pod) (increase(ringplan_captures_written_total[30m])) > 0
    """,
    "0m",
    CRITICAL,
    f"{_WHERE}: the plan cache made a wrong plan in the last 30 minutes.",
    """
    A cached plan{{ with $labels.plan_label }} of {{ . }}{{ end }}{{ with $labels.session }} in {{ . }}{{ end }}
    differed from the full one. The full one was served, so no token is wrong; with the cache mode `on` it would
    have gone unnoticed. If ringplan_drills_total rose too, somebody is testing this page.
    """,
    PLAN_CACHE_DASHBOARD,
    _OF_SESSION,
)

SCHEDULE_MISMATCH = Alert(
    "RingplanAttentionScheduleMismatch",
    "sum by (namespace, pod) (increase(ringplan_attention_plan_mismatches_total[30m])) > 0",
    "0m",
    CRITICAL,
    f"{_WHERE}: a FlashInfer schedule that was kept was wrong in the last 30 minutes.",
    """
    The schedule of an earlier step differed from a fresh one where it should not. The fresh one ran, so no token is
    wrong; engines that do not run with the cache mode `verify` would have used the kept one.
    """,
    INFERENCE_DASHBOARD,
)

HIT_RATIO_LOW = Alert(
    "RingplanPlanCacheHitRatioLow",
    # A request that begins or ends changes the batch, and a changed batch misses once: that many misses are as they
    # should be. Engines without our metrics are judged by the ratio alone. A scrape may lack the sessions' gauges.
    """
    (
      session_plan_label:ringplan_plan_cache_hits:ratio_rate5m < 0.5
      and session_plan_label:ringplan_decode_plans:rate5m > 1
      and on (namespace, pod, session) last_over_time(ringplan_session_info{cache_mode!="off"}[5m])
    )
    unless (
      (
        session_plan_label:ringplan_decode_plans:rate5m
        * (1 - session_plan_label:ringplan_plan_cache_hits:ratio_rate5m)
      )
      <= on (namespace, pod) group_left ()
      3 * (
        sum by (namespace, pod) (rate(ringplan_requests_finished_total[5m]))
        +
        sum by (namespace, pod) (rate(ringplan_preemptions_total[5m]))
      )
    )
    """,
    "10m",
    WARNING,
    f"{_WHERE}: only {{{{ $value | humanizePercentage }}}} of decode plans come from the plan cache.",
    """
    {{ $labels.session }}, plan label {{ $labels.plan_label }}: fewer than half of its decode plans hit for 10
    minutes, and more misses than requests that begin or end explain. Tokens are right; planning costs more than it
    should.
    """,
    PLAN_CACHE_DASHBOARD,
    _OF_SESSION,
)

RING_STALLS = Alert(
    "RingplanRingStalls",
    "session:ringplan_ring_stalls:ratio_rate5m > 0.05",
    "5m",
    WARNING,
    f"{_WHERE}: the engine waits {{{{ $value | humanizePercentage }}}} of the time for a free buffer set.",
    """
    {{ $labels.session }}: steps stall because every buffer set of the ring is leased while the engine has no plan
    left to run. The engine releases sets too late, or the ring is too shallow.
    """,
    PLAN_CACHE_DASHBOARD,
    _OF_SESSION,
)

LEASE_STUCK = Alert(
    "RingplanLeaseStuck",
    "max by (namespace, pod, session) (ringplan_ring_oldest_lease_age_seconds) > 60",
    "1m",
    CRITICAL,
    f"{_WHERE}: the engine has held one plan for {{{{ $value | humanizeDuration }}}}.",
    """
    {{ $labels.session }}: a step does not end, so requests hang. ringplan_ring_oldest_lease_step names the step.
    The engine's thread or its device is stuck.
    """,
    PLAN_CACHE_DASHBOARD,
    _OF_SESSION,
)

PLANNER_DOWN = Alert(
    "RingplanPlannerDown",
    """
    max by (namespace, pod) (ringplan_planner_connected) == 0
    or
    (
      max by (namespace, pod) (up{job="ringplan", container="planner"}) == 0
      and on (namespace, pod)
      max by (namespace, pod) (up{job="ringplan", container="engine"}) == 1
    )
    """,
    "1m",
    CRITICAL,
    f"{_WHERE}: the engine is up and its planner is not.",
    """
    The engine has no session with its planner, or the planner does not answer scrapes. Without a session the engine
    is not ready; requests it had taken wait until the planner is back.
    """,
    INFERENCE_DASHBOARD,
)

RECONNECT_STORM = Alert(
    "RingplanReconnectStorm",
    # An increase is extrapolated to the window's ends, by a few percent: three must not look like more.
    "sum by (namespace, pod) (increase(ringplan_planner_reconnects_total[15m])) > 3.5",
    "0m",
    CRITICAL,
    f'{_WHERE}: {{{{ $value | printf "%.0f" }}}} new sessions between engine and planner in 15 minutes.',
    """
    Each time every running request is computed again from its first token. The planner restarts, answers too late,
    or the engine breaks the protocol.
    """,
    INFERENCE_DASHBOARD,
)

OUT_OF_PAGES = Alert(
    "RingplanOutOfPages",
    """
    sum by (namespace, pod, session) (rate(ringplan_layout_errors_total{reason="out_of_pages"}[5m])) * 60 > 1
    """,
    "10m",
    WARNING,
    f'{_WHERE}: {{{{ $value | printf "%.1f" }}}} steps a minute find too few free pages.',
    """
    {{ $labels.session }}: the KV cache is too small for the load. Requests are put back and computed again
    (ringplan_preemptions_total), which takes time from all others.
    """,
    PLAN_CACHE_DASHBOARD,
    _OF_SESSION,
)


def _build_burn_expr(burns: Iterable[tuple[str, str, float]]) -> str:
    """Returns a query that holds where one of the pairs of windows burns the budget too fast."""
    budget = 1 - FIRST_TOKEN_OBJECTIVE
    parts = []
    for long, short, pace in burns:
        share = f"{pace * budget:.4g}"
        seconds = int(long[:-1]) * _SECONDS[long[-1]]
        parts.append(
            "(\n"
            f"  namespace:ringplan_first_tokens_late:ratio_rate{long} > {share}\n"
            f"  and namespace:ringplan_first_tokens_late:ratio_rate{short} > {share}\n"
            f"  and namespace:ringplan_first_tokens_due:rate{long} * {seconds} >= {_MIN_REQUESTS}\n"
            ")"
        )
    return "\nor\n".join(parts)


_OBJECTIVE = f"{FIRST_TOKEN_OBJECTIVE:.0%} of requests within {FIRST_TOKEN_SECONDS} s"

BURN_FAST = Alert(
    "RingplanTimeToFirstTokenBurnFast",
    _build_burn_expr(FAST_BURNS),
    "0m",
    CRITICAL,
    "{{ $labels.namespace }}: {{ $value | humanizePercentage }} of requests get their first token too late.",
    f"""
    The objective is a first token for {_OBJECTIVE}. At this pace a month's budget of late ones is gone within days,
    and it is being spent now. A refused request counts as late.
    """,
    INFERENCE_DASHBOARD,
    ("namespace",),
)

BURN_SLOW = Alert(
    "RingplanTimeToFirstTokenBurnSlow",
    _build_burn_expr(SLOW_BURNS),
    "0m",
    WARNING,
    "{{ $labels.namespace }}: {{ $value | humanizePercentage }} of requests get their first token too late.",
    f"""
    The objective is a first token for {_OBJECTIVE}. If this goes on the month's budget of late ones will not last.
    A refused request counts as late.
    """,
    INFERENCE_DASHBOARD,
    ("namespace",),
)

ALERTS = Group(
    "ringplan-alerts",
    (
        MISMATCH,
        SCHEDULE_MISMATCH,
        HIT_RATIO_LOW,
        RING_STALLS,
        LEASE_STUCK,
        PLANNER_DOWN,
        RECONNECT_STORM,
        OUT_OF_PAGES,
        BURN_FAST,
        BURN_SLOW,
    ),
)

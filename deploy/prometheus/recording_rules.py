"""Series that alerts and people share: hit ratio, stalls, latency quantiles, error ratios, the latency objective."""

from deploy.prometheus.rule import Group, RecordingRule

# The objective: so large a share of requests has its first token in so many seconds, over 30 days. The seconds are a
# bucket of the engine's histogram; a refused request has no first token and counts as late.
FIRST_TOKEN_SECONDS = 2.5
FIRST_TOKEN_OBJECTIVE = 0.99
# (long window, short window, times the budget's even pace): the pace is fast over the long one and still is.
FAST_BURNS = (("1h", "5m", 14.4), ("6h", "30m", 6))
SLOW_BURNS = (("1d", "2h", 3), ("3d", "6h", 1))
_FINE_WINDOWS = ("5m", "30m", "1h")
_COARSE_WINDOWS = ("2h", "6h", "1d", "3d")
_QUANTILES = (0.5, 0.95, 0.99)

# Reasons of layouts that no cached plan could have served.
_NOT_CACHEABLE = "fork|not_committing|not_decode"

PLAN_CACHE = Group(
    "ringplan-plan-cache",
    (
        RecordingRule(
            "session_plan_label:ringplan_decode_plans:rate5m",
            f"""
            sum by (namespace, pod, session, plan_label) (rate(ringplan_plan_cache_hits_total[5m]))
            +
            sum by (namespace, pod, session, plan_label) (
              rate(ringplan_plan_cache_misses_total{{reason!~"{_NOT_CACHEABLE}"}}[5m])
            )
            """,
        ),
        RecordingRule(
            "session_plan_label:ringplan_plan_cache_hits:ratio_rate5m",
            """
            sum by (namespace, pod, session, plan_label) (rate(ringplan_plan_cache_hits_total[5m]))
            /
            (session_plan_label:ringplan_decode_plans:rate5m > 0)
            """,
        ),
        RecordingRule(
            "session:ringplan_ring_stalls:ratio_rate5m",
            'sum by (namespace, pod, session) (rate(ringplan_ring_wait_seconds_sum{kind="stall"}[5m]))',
        ),
    ),
)

REQUESTS = Group(
    "ringplan-requests",
    (
        *(
            RecordingRule(
                "pod:ringplan_time_to_first_token_seconds:quantile_rate5m",
                f"""
                histogram_quantile(
                  {quantile},
                  sum by (namespace, pod, le) (rate(ringplan_time_to_first_token_seconds_bucket[5m]))
                )
                """,
                {"quantile": str(quantile)},
            )
            for quantile in _QUANTILES
        ),
        RecordingRule(
            "pod:ringplan_requests_failed:ratio_rate5m",
            """
            (
              sum by (namespace, pod) (rate(ringplan_requests_finished_total{reason="error"}[5m]))
              +
              sum by (namespace, pod) (rate(ringplan_requests_refused_total[5m]))
            )
            /
            (
              sum by (namespace, pod) (rate(ringplan_requests_finished_total[5m]))
              +
              sum by (namespace, pod) (rate(ringplan_requests_refused_total[5m]))
              > 0
            )
            """,
        ),
        RecordingRule(
            "pod:ringplan_layout_errors:ratio_rate5m",
            """
            sum by (namespace, pod) (rate(ringplan_layout_errors_total[5m]))
            /
            (
              sum by (namespace, pod) (rate(ringplan_layout_errors_total[5m]))
              +
              sum by (namespace, pod) (rate(ringplan_plan_duration_seconds_count[5m]))
              > 0
            )
            """,
        ),
    ),
)


def _build_first_token_rules(window: str) -> tuple[RecordingRule, RecordingRule]:
    """Returns the rules of one window: requests a second, and the share of them whose first token was late."""
    due = f"namespace:ringplan_first_tokens_due:rate{window}"
    return (
        RecordingRule(
            due,
            f"""
            sum by (namespace) (rate(ringplan_time_to_first_token_seconds_count[{window}]))
            +
            sum by (namespace) (rate(ringplan_requests_refused_total[{window}]))
            """,
        ),
        RecordingRule(
            f"namespace:ringplan_first_tokens_late:ratio_rate{window}",
            f"""
            1
            -
            sum by (namespace) (
              rate(ringplan_time_to_first_token_seconds_bucket{{le="{FIRST_TOKEN_SECONDS}"}}[{window}])
            )
            /
            ({due} > 0)
            """,
        ),
    )


FIRST_TOKENS = Group(
    "ringplan-first-tokens", tuple(rule for window in _FINE_WINDOWS for rule in _build_first_token_rules(window))
)
# Long windows read many samples and change slowly.
FIRST_TOKENS_LONG = Group(
    "ringplan-first-tokens-long",
    tuple(rule for window in _COARSE_WINDOWS for rule in _build_first_token_rules(window)),
    interval="2m",
)

RECORDING_GROUPS = (PLAN_CACHE, REQUESTS, FIRST_TOKENS, FIRST_TOKENS_LONG)

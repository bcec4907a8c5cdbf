"""PromQL as the panels need it: rates, quantiles and ratios, filtered by the dashboard's variables."""

# Matches series without the label too, where a variable stands at "All" (`.*`).
PODS = 'namespace=~"$namespace",pod=~"$pod"'
SESSIONS = f'{PODS},session=~"$session"'
# Plans that no cached one could have served say nothing about the cache.
DECODE_MISSES = f'{SESSIONS},reason!~"fork|not_committing|not_decode"'
WINDOW = "$__rate_interval"


def rate(metric: str, selector: str, *labels: str) -> str:
    """Builds the rate of a counter, summed.

    Args:
        metric: the counter.
        selector: label matchers.
        labels: what to keep apart.

    Returns:
        An expression.
    """
    return f"{_sum(labels)}(rate({metric}{{{selector}}}[{WINDOW}]))"


def increase(metric: str, selector: str, *labels: str, window: str = WINDOW) -> str:
    """Builds how much a counter grew over a window, summed.

    Args:
        metric: the counter.
        selector: label matchers.
        labels: what to keep apart.
        window: how far back.

    Returns:
        An expression.
    """
    return f"{_sum(labels)}(increase({metric}{{{selector}}}[{window}]))"


def quantile(rank: float, histogram: str, selector: str, *labels: str) -> str:
    """Builds a quantile of what a histogram observed lately.

    Args:
        rank: from 0 to 1.
        histogram: its name, without `_bucket`.
        selector: label matchers.
        labels: what to keep apart.

    Returns:
        An expression.
    """
    return f"histogram_quantile({rank:g}, {rate(f'{histogram}_bucket', selector, 'le', *labels)})"


def mean(histogram: str, selector: str, *labels: str) -> str:
    """Builds the mean of what a histogram observed lately.

    Args:
        histogram: its name, without `_sum`.
        selector: label matchers.
        labels: what to keep apart.

    Returns:
        An expression.
    """
    return share(rate(f"{histogram}_sum", selector, *labels), rate(f"{histogram}_count", selector, *labels))


def share(part: str, whole: str) -> str:
    """Builds a ratio that is empty, not NaN, where there is nothing to divide by.

    Args:
        part: an expression.
        whole: an expression with the same labels.

    Returns:
        An expression.
    """
    return f"{part} / ({whole} > 0)"


def hit_ratio(*labels: str) -> str:
    """Builds the share of decode plans that came from the plan cache.

    Args:
        labels: what to keep apart.

    Returns:
        An expression.
    """
    hits = rate("ringplan_plan_cache_hits_total", SESSIONS, *labels)
    misses = rate("ringplan_plan_cache_misses_total", DECODE_MISSES, *labels)
    return share(hits, f"({hits} + {misses})")


def gauge(metric: str, selector: str, *labels: str, how: str = "sum") -> str:
    """Builds a gauge, summed or otherwise put together.

    Args:
        metric: the gauge.
        selector: label matchers.
        labels: what to keep apart.
        how: `sum`, `max` or `min`.

    Returns:
        An expression.
    """
    return f"{how}{_by(labels)}({metric}{{{selector}}})"


def _sum(labels: tuple[str, ...]) -> str:
    return f"sum{_by(labels)}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""

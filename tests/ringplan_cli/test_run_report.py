"""The table after an answer."""

import io

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server
from rich.console import Console

from ringplan_cli.run_report import AnswerTimes, Metrics, build_rows, fetch_metrics, print_report

PAGE = """\
# HELP ringplan_plan_cache_hits_total Hits.
# TYPE ringplan_plan_cache_hits_total counter
ringplan_plan_cache_hits_total{session="s1",plan_label="main"} 3.0
ringplan_plan_cache_hits_total{session="s1",plan_label="cfg"} 4.0
# TYPE ringplan_ring_waits_total counter
ringplan_ring_waits_total{session="s1",kind="stall"} 1.0
ringplan_ring_waits_total{session="s1",kind="backpressure"} 90.0
# TYPE ringplan_plan_duration_seconds histogram
ringplan_plan_duration_seconds_bucket{source="full",le="+Inf"} 1200.0
ringplan_plan_duration_seconds_count{source="full"} 1200.0
ringplan_plan_duration_seconds_sum{source="full"} 0.5
ringplan_plan_duration_seconds_bucket{source="cached",le="+Inf"} 34.0
ringplan_plan_duration_seconds_count{source="cached"} 34.0
ringplan_plan_duration_seconds_sum{source="cached"} 0.1
"""


def read_page() -> Metrics:
    """Returns the samples of the page above."""
    metrics = Metrics()
    metrics.read(PAGE)
    return metrics


def test_sum_adds_series_and_keeps_to_labels() -> None:
    """A sum is over all series that have the labels asked for."""
    metrics = read_page()
    assert metrics.sum("ringplan_plan_cache_hits_total") == 7
    assert metrics.sum("ringplan_ring_waits_total", kind="stall") == 1
    assert metrics.sum("ringplan_ring_waits_total", kind="other") == 0


def test_sum_of_a_metric_that_is_not_there_is_none() -> None:
    """Not known is not 0."""
    assert read_page().sum("ringplan_plan_cache_mismatches_total") is None


def test_times_count_from_the_first_token() -> None:
    """Speed is that of the tokens after the first ones: those waited for the prompt."""
    times = AnswerTimes(started=10.0)
    for num_tokens, now in ((0, 10.5), (1, 11.0), (2, 11.5), (2, 13.0)):
        times.add_tokens(num_tokens, now)
    assert times.time_to_first_token_seconds == 1.0
    assert times.tokens_per_second == 4 / 2.0


def test_times_of_too_few_tokens_are_not_told() -> None:
    """No token has no first one, and one token has no speed."""
    times = AnswerTimes(started=0.0)
    assert times.time_to_first_token_seconds is None
    times.add_tokens(1, 1.0)
    assert times.tokens_per_second is None


def test_rows_tell_plans_cache_and_stalls() -> None:
    """The table has what both processes counted, and a dash for what they did not tell."""
    rows = dict(build_rows(AnswerTimes(0.0), 12, 34, read_page()))
    assert rows["tokens"] == "12 prompt + 34 answer"
    assert rows["plans made"] == "1,234"
    assert rows["plan cache"] == "7 hits / - misses / - mismatches"
    assert rows["ring stalls"] == "1"


def test_rows_without_metrics_are_those_the_caller_saw() -> None:
    """A remote engine's answer is described by what came over the wire."""
    assert [name for name, _ in build_rows(AnswerTimes(0.0), 1, 2, None)] == [
        "tokens",
        "time to first token",
        "tokens/s",
    ]


def test_report_is_plain_where_nobody_looks() -> None:
    """In a file the table is one `name: value` a line, without escape sequences."""
    output = io.StringIO()
    print_report(Console(file=output), [("tokens", "1 [prompt]"), ("speed", "2")])
    assert output.getvalue() == "tokens: 1 [prompt]\nspeed: 2\n"


def test_metrics_are_fetched_from_every_page_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that does not answer is left out, and no proxy is asked for pages of this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    registry = CollectorRegistry()
    Counter("boats", "Boats.", registry=registry).inc(5)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        metrics = fetch_metrics("http://127.0.0.1:1/metrics", f"http://127.0.0.1:{server.server_port}/metrics")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert metrics.sum("boats_total") == 5

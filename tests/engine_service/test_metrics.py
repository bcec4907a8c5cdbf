"""Rules of the engine's metrics, as a scrape sees them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_service.metrics import FINISH_REASONS, EngineMetrics
from tests.engine_service.toy_engine import ToyEngine


def test_two_engines_can_live_in_one_process() -> None:
    """Metrics are declared on the registry that is passed in, and nowhere else."""
    EngineMetrics(CollectorRegistry())
    EngineMetrics(CollectorRegistry())


@pytest.mark.parametrize("reason", FINISH_REASONS)
def test_every_finish_reason_is_there_from_the_start(reason: str) -> None:
    """A rate over a reason that has not come yet is 0, not absent."""
    registry = CollectorRegistry()
    EngineMetrics(registry)
    assert registry.get_sample_value("ringplan_requests_finished_total", {"reason": reason}) == 0


def test_requests_tokens_and_times_are_counted() -> None:
    """Two requests of 3 and 2 tokens: what was asked, generated and waited for."""
    toy = ToyEngine(max_running_requests=1, max_step_tokens=4)
    toy.add([1, 2], 3)
    toy.add([4], 2)
    for _ in range(5):
        toy.tick()
        toy.now += 1.0
    assert toy.read_metric("ringplan_prompt_tokens_total") == 3
    assert toy.read_metric("ringplan_generation_tokens_total") == 5
    assert toy.read_metric("ringplan_requests_finished_total", reason="length") == 2
    # The first request has its tokens at 0, 1 and 2 s, the second at 3 and 4 s.
    assert toy.read_metric("ringplan_time_to_first_token_seconds_sum") == 3
    assert toy.read_metric("ringplan_inter_token_latency_seconds_count") == 3
    assert toy.read_metric("ringplan_inter_token_latency_seconds_sum") == 3
    assert toy.read_metric("ringplan_request_queue_seconds_sum") == 3
    assert toy.read_metric("ringplan_request_duration_seconds_sum") == 6
    assert toy.read_metric("ringplan_step_rows_count") == 5
    assert toy.read_metric("ringplan_plan_wait_seconds_count") == 5


def test_load_is_what_it_is_after_the_last_step() -> None:
    """Running, waiting and the share of pages held."""
    toy = ToyEngine(max_running_requests=1, max_step_tokens=4, page_size=4, num_pages=9)
    toy.add([1, 2, 3], 20)
    toy.add([1], 5)
    toy.tick()
    toy.tick()
    assert toy.read_metric("ringplan_requests_running") == 1
    assert toy.read_metric("ringplan_requests_waiting") == 1
    # 5 tokens take 2 pages of 8.
    assert toy.read_metric("ringplan_kv_cache_usage_ratio") == 0.25


def test_lost_planner_is_seen() -> None:
    """The gauge says whether there is a session, the counter how often it was lost."""
    toy = ToyEngine()
    toy.tick()
    assert toy.read_metric("ringplan_planner_connected") == 1
    toy.planner.is_lost = True
    toy.tick()
    assert toy.read_metric("ringplan_planner_connected") == 0
    toy.now += 10
    toy.tick()
    assert toy.read_metric("ringplan_planner_connected") == 1
    assert toy.read_metric("ringplan_planner_lost_total") == 1


def test_every_metric_has_help_and_the_prefix() -> None:
    """What a reader of /metrics sees explains itself."""
    registry = CollectorRegistry()
    EngineMetrics(registry)
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("# HELP"):
            name, _, text = line.removeprefix("# HELP ").partition(" ")
            assert name.startswith("ringplan_")
            assert text.endswith(".")


def test_plans_are_counted_by_whether_they_were_ready() -> None:
    """The share of ready ones says how well planning ahead works; both are there from the start."""
    toy = ToyEngine()
    assert toy.read_metric("ringplan_plans_taken_total", readiness="ready") == 0
    toy.add([1], 5)
    toy.tick()
    toy.planner.was_plan_ready = True
    toy.run_until_idle()
    assert toy.read_metric("ringplan_plans_taken_total", readiness="waited") == 1
    assert toy.read_metric("ringplan_plans_taken_total", readiness="ready") == 4

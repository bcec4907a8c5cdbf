"""Rules of the engine's metrics, as a scrape sees them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_service.metrics import FINISH_REASONS, SCHEDULE_OUTCOMES, EngineMetrics
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
    assert toy.read_metric("ringplan_planner_reconnects_total") == 1


def test_attempts_that_fail_are_no_reconnects() -> None:
    """A planner that stays away is lost once; only a new session counts."""
    toy = ToyEngine()
    toy.planner.is_lost = toy.planner.is_away = True
    for _ in range(5):
        toy.tick()
        toy.now += 10
    assert toy.read_metric("ringplan_planner_lost_total") == 1
    assert toy.read_metric("ringplan_planner_reconnects_total") == 0
    toy.planner.is_away = False
    toy.tick()
    assert toy.read_metric("ringplan_planner_reconnects_total") == 1


def test_padding_rows_are_counted_beside_requests() -> None:
    """A decode step of three requests is padded to four rows, one of two and a prefill not at all."""
    toy = ToyEngine(max_step_tokens=64)
    for _ in range(3):
        toy.add([1, 2], 3)
    toy.tick()
    assert toy.read_metric("ringplan_padding_rows_total") == 0
    toy.tick()
    toy.tick()
    assert toy.read_metric("ringplan_padding_rows_total") == 2
    toy.add([1], 3)
    toy.add([1], 3)
    toy.run_until_idle()
    assert toy.read_metric("ringplan_padding_rows_total") == 2
    assert toy.read_metric("ringplan_step_rows_sum") == 3 * 3 + 3 * 2


def test_engine_says_what_it_runs() -> None:
    """One series of value 1, to join with others."""
    registry = CollectorRegistry()
    EngineMetrics(registry).describe_engine(version="1.2.3", model="tiny", dtype="float32", device="cpu")
    labels = {"version": "1.2.3", "model": "tiny", "dtype": "float32", "device": "cpu"}
    assert registry.get_sample_value("ringplan_engine_info", labels) == 1


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


def test_attention_schedules_are_counted_by_what_became_of_them() -> None:
    """Each outcome is there from the start; a comparison that fails counts twice: as one, and as a mismatch."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"ringplan_attention_{name}_total", labels)

    assert [read("plans", outcome=outcome) for outcome in SCHEDULE_OUTCOMES] == [0, 0, 0]
    assert read("plan_mismatches") == 0
    metrics.schedule_made()
    metrics.schedule_kept()
    metrics.schedule_kept()
    metrics.schedule_verified(is_equal=True)
    metrics.schedule_verified(is_equal=True)
    metrics.schedule_verified(is_equal=False)
    assert [read("plans", outcome=outcome) for outcome in ("planned", "skipped", "verified")] == [1, 2, 3]
    assert read("plan_mismatches") == 1

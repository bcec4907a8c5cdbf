"""Sessions as texts: what `ringplan inspect` shows."""

import pytest

from ringplan.planner.v1 import planner_pb2 as pb
from ringplan_cli import session_tables as texts

MISSES = [
    pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_COLD, num_misses=1),
    pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_ROWS, num_misses=1_234),
]
SUMMARY = pb.SessionSummary(
    session="session-3",
    engine_name="engine",
    age_seconds=75.2,
    page_size=16,
    num_pages=1_025,
    num_free_pages=1_000,
    num_shared_pages=2,
    num_streams=5,
    num_steps_in_flight=3,
    ring_depth=8,
    num_leased_sets=4,
    cache_mode=pb.CACHE_MODE_ON,
    region_bytes=3 << 20,
    locked_bytes=1536,
    num_cache_hits=2_000,
    cache_misses=MISSES,
    num_cache_mismatches=1,
)


def test_session_row_has_its_figures_in_short() -> None:
    """Pages and sets with how many there are; the sink page is none that could be free."""
    (row,) = texts.build_session_rows([SUMMARY])
    assert dict(zip([column.name for column in texts.SESSION_COLUMNS], row, strict=True)) == {
        "session": "session-3",
        "engine": "engine",
        "age": "1:15",
        "free pages": "1,000 of 1,024",
        "streams": "5",
        "in flight": "3",
        "leased sets": "4 of 8",
        "cache": "on",
        "hits": "2,000",
        "misses": "1,235",
    }


def test_summary_names_every_figure() -> None:
    """Pages, ring, memory and cache, with the misses by reason, the most frequent first."""
    assert dict(texts.build_summary_rows(SUMMARY)) == {
        "engine": "engine",
        "age": "1:15",
        "pages": "1,024 of 16 tokens: 1,000 free, 24 in use, 2 shared",
        "streams": "5",
        "steps in flight": "3",
        "ring": "4 of 8 sets leased",
        "memory": "3.0 MiB, 1.5 KiB of it locked",
        "plan cache": "on: 2,000 hits, 1,235 misses, 1 mismatches",
        "misses": "rows 1,234, cold 1",
    }


def test_drill_that_is_pending_is_told() -> None:
    """Whoever wonders whether the next mismatch will be real looks there."""
    drilled = pb.SessionSummary()
    drilled.CopyFrom(SUMMARY)
    drilled.is_drill_pending = True
    expected = "on: 2,000 hits, 1,235 misses, 1 mismatches, a drill is pending"
    assert dict(texts.build_summary_rows(drilled))["plan cache"] == expected


def test_session_without_a_name_or_misses_says_so() -> None:
    """An engine need not have a name."""
    rows = dict(texts.build_summary_rows(pb.SessionSummary(num_pages=2)))
    assert (rows["engine"], rows["misses"]) == ("-", "none")


def test_rows_of_a_session_s_parts() -> None:
    """Streams with lengths and pages, leases with their ages, cached plans with hits and misses."""
    stream = pb.StreamState(
        stream=7, committed_length=17, planned_length=1_018, pages=[4, 5, 6, 2], num_steps_in_flight=1
    )
    assert texts.build_stream_rows([stream]) == [["7", "17", "1,018", "1", "4", "4-6 2"]]
    lease = pb.LeaseState(step_id=9, region_id=1, set_index=3, age_seconds=0.0125)
    assert texts.build_lease_rows([lease]) == [["9", "1", "3", "12.5 ms"]]
    entry = pb.CacheEntryState(plan_labels=["both", "img"], num_rows=6, num_hits=7, misses=MISSES)
    assert texts.build_cache_rows([entry]) == [["both, img", "6", "7", "rows 1,234, cold 1"]]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "-"), ([3], "3"), ([1, 2, 3, 7], "1-3 7"), ([7, 6, 5], "7 6 5"), ([1, 2, 2, 3], "1-2 2-3")],
)
def test_page_numbers_keep_their_order(numbers: list[int], text: str) -> None:
    """Runs of rising numbers are ranges; pages stand in the order of the stream's tokens."""
    assert texts.write_ranges(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 ms"), (0.9994, "999.4 ms"), (1, "1.0 s"), (59.9, "59.9 s"), (3_725, "1:02:05")]
)
def test_lengths_of_time_are_as_people_read_them(seconds: float, text: str) -> None:
    """Milliseconds for leases, minutes and hours for sessions."""
    assert texts.write_seconds(seconds) == text

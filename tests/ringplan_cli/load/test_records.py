"""A record's latencies follow from when tokens came."""

import pytest

from ringplan_cli.load.records import Outcome, RequestRecord
from ringplan_cli.load.schedule import LoadRequest


def build_record(*tokens: tuple[int, int, float], outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    """Builds the record of a request that is due at 10: (sample, number of tokens, time) for each message."""
    record = RequestRecord(0, LoadRequest(10.0, 1, 8, prompt_tokens=4), outcome, sent_seconds=10.25)
    for sample, num_tokens, seconds in tokens:
        record.add_tokens(sample, num_tokens, seconds)
    record.ended_seconds = 20.0
    return record


def test_latencies_count_from_when_the_request_was_due() -> None:
    """Not from when it was sent: a generator that is late must not make the engine look fast."""
    record = build_record((0, 1, 12.0), (0, 1, 12.5))
    assert (record.ttft_seconds, record.end_to_end_seconds, record.lag_seconds) == (2.0, 10.0, 0.25)


def test_tokens_of_one_message_share_the_time_since_the_last() -> None:
    """Three tokens after 0.6 s are three gaps of 0.2 s; the longest gap is the whole pause."""
    record = build_record((0, 1, 11.0), (0, 3, 11.6), (0, 1, 12.0))
    assert record.read_gaps().tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert record.inter_token_seconds == pytest.approx(0.25)
    assert record.longest_gap_seconds == pytest.approx(0.6)


def test_samples_are_timed_by_themselves() -> None:
    """The first token of any counts; gaps are within a sample."""
    record = build_record((1, 1, 12.0), (0, 1, 13.0), (1, 1, 12.5), (0, 1, 14.0))
    assert record.ttft_seconds == 2.0
    assert sorted(record.read_gaps()) == pytest.approx([0.5, 1.0])
    assert record.num_answer_tokens == 4


def test_messages_without_tokens_are_no_tokens() -> None:
    """Held-back text may come alone."""
    record = build_record((0, 0, 11.0), (0, 1, 12.0), (0, 0, 13.0))
    assert (record.ttft_seconds, record.num_answer_tokens, record.longest_gap_seconds) == (2.0, 1, None)


def test_request_that_got_nothing_has_no_latencies() -> None:
    """They are null in the requests file, not zero."""
    values = build_record(outcome=Outcome.REFUSED).as_json()
    names = ("ttft_seconds", "inter_token_seconds", "longest_gap_seconds", "end_to_end_seconds")
    assert [values[name] for name in names] == [None] * 4
    assert (values["outcome"], values["answer_tokens"]) == ("refused", 0)

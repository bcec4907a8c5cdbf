"""Messages as plain values: every field under its name, numbers as numbers, enums as words."""

import json

from ringplan.planner.v1 import planner_pb2 as pb
from ringplan_cli.plain_messages import build_plain, name_value


def test_every_field_is_there_even_if_it_is_not_set() -> None:
    """A reader of the JSON finds every field of the message, repeated ones as lists."""
    plain = build_plain(pb.DumpSessionResponse())
    assert set(plain) == {field.name for field in pb.DumpSessionResponse.DESCRIPTOR.fields}
    assert plain["streams"] == []
    assert plain["summary"]["num_pages"] == 0


def test_values_keep_their_kind() -> None:
    """64-bit numbers stay numbers, messages become objects, enums small words."""
    summary = pb.SessionSummary(
        session="s",
        region_bytes=2**40,
        cache_mode=pb.CACHE_MODE_VERIFY,
        cache_misses=[pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_STREAM_CHANGED, num_misses=3)],
    )
    plain = json.loads(json.dumps(build_plain(summary)))
    assert (plain["session"], plain["region_bytes"], plain["cache_mode"]) == ("s", 2**40, "verify")
    assert plain["cache_misses"] == [{"reason": "stream_changed", "num_misses": 3}]


def test_enum_value_of_a_newer_planner_is_a_number() -> None:
    """A value that this version does not know is shown, not refused."""
    assert name_value(pb.CacheMode.DESCRIPTOR, pb.CACHE_MODE_ON) == "on"
    assert name_value(pb.CacheMode.DESCRIPTOR, 99) == "99"

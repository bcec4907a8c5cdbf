"""Options and errors cross the wire unchanged."""

import pytest

from planner_service import errors
from planner_service.client_wire import build_open_request, read_cache_mode, read_plan_error
from planner_service.messages import CacheMode
from ringplan.planner.v1 import planner_pb2 as pb

OPTIONS = {"page_size": 16, "num_pages": 100, "max_streams": 8}


def test_choices_left_to_the_planner_are_sent_as_none() -> None:
    """Without a ring depth and a cache mode the planner's defaults hold."""
    request = build_open_request(page_size=16, num_pages=100, max_streams=8)
    assert request == pb.PlanRequest(open=pb.SessionOptions(page_size=16, num_pages=100, max_streams=8))


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        (CacheMode.OFF, pb.CACHE_MODE_OFF),
        (CacheMode.ON, pb.CACHE_MODE_ON),
        (CacheMode.VERIFY, pb.CACHE_MODE_VERIFY),
    ],
)
def test_cache_modes_go_both_ways(mode: CacheMode, number: pb.CacheMode) -> None:
    """Each cache mode has its number on the wire; `off` is a choice, not the absence of one."""
    assert build_open_request(page_size=1, num_pages=2, max_streams=1, cache_mode=mode).open.cache_mode == number
    assert read_cache_mode(number) is mode


def test_an_unnamed_cache_mode_is_refused() -> None:
    """A planner that names no cache mode is not one of ours."""
    with pytest.raises(ValueError, match="cache mode 0"):
        read_cache_mode(pb.CACHE_MODE_UNSPECIFIED)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("page_size", 0),
        ("page_size", 65_537),
        ("num_pages", 1),
        ("max_streams", 0),
        ("ring_depth", 1),
        ("ring_depth", 1_025),
        ("set_bytes", -1),
        ("engine_name", "x" * 129),
        ("engine_name", "\udc80"),
    ],
)
def test_options_out_of_range_are_refused_here(option: str, value: int | str) -> None:
    """A bad option is named before anything is sent."""
    options: dict[str, object] = {**OPTIONS, option: value}
    with pytest.raises(errors.InvalidOptionsError) as caught:
        build_open_request(**options)  # type: ignore[arg-type]  # The point of the test.
    assert caught.value.field == option


@pytest.mark.parametrize(
    ("fields", "kind", "figures"),
    [
        (
            {"reason": pb.PLAN_ERROR_REASON_OUT_OF_PAGES, "pages_short": 3},
            errors.OutOfPagesError,
            {"num_short": 3, "num_free": None},
        ),
        (
            {"reason": pb.PLAN_ERROR_REASON_INVALID_LAYOUT, "stream": 4},
            errors.InvalidLayoutError,
            {"stream": 4},
        ),
        (
            {"reason": pb.PLAN_ERROR_REASON_UNKNOWN_STREAM, "stream": 9},
            errors.UnknownStreamError,
            {"stream": 9, "max_streams": 8},
        ),
        (
            {
                "reason": pb.PLAN_ERROR_REASON_RING_TIMEOUT,
                "oldest_lease_step_id": 2,
                "oldest_lease_age_seconds": 1.5,
            },
            errors.RingTimeoutError,
            {"oldest_step_id": 2, "oldest_age_seconds": 1.5},
        ),
        ({"reason": pb.PLAN_ERROR_REASON_REGION_UNAVAILABLE}, errors.RegionUnavailableError, {"stream": None}),
        ({"reason": pb.PLAN_ERROR_REASON_UNSPECIFIED}, errors.InvalidLayoutError, {}),
    ],
)
def test_errors_come_back_with_their_figures_and_words(
    fields: dict[str, object], kind: type[errors.LayoutError], figures: dict[str, object]
) -> None:
    """The engine catches the class that the planner raised, with its figures, its steps and its message."""
    wire = pb.PlanError(step_id=5, num_steps=2, message="the planner's words", **fields)  # type: ignore[arg-type]  # As above.
    error = read_plan_error(wire, max_streams=8)
    assert type(error) is kind
    assert str(error) == "the planner's words"
    assert (error.step_id, error.num_steps) == (5, 2)
    for name, value in figures.items():
        assert getattr(error, name) == value


def test_every_error_of_a_layout_has_a_way_over_the_wire() -> None:
    """Whatever class the planner may answer a layout with, the client knows it."""
    known = {
        type(read_plan_error(pb.PlanError(reason=reason, stream=0), 8))
        for reason in pb.PlanErrorReason.values()
        if reason
    }
    assert known == set(errors.LayoutError.__subclasses__())

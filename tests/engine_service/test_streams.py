"""Rules of how much of a request's streams a step computes."""

import pytest

from engine_service.streams import MIN_FORKED_TOKENS, StreamFork, build_streams, find_start, share_tokens

PROMPT = tuple(range(20))


@pytest.mark.parametrize(
    ("context", "num_forked"),
    [
        ((*range(12), 99, 98), 12),
        ((*range(MIN_FORKED_TOKENS), 99), MIN_FORKED_TOKENS),
        ((*range(MIN_FORKED_TOKENS - 1), 99), 0),
        ((99, *range(12)), 0),
        (PROMPT, 19),
        (PROMPT[:12], 11),
        ((*PROMPT, 99), 19),
        ((5,), 0),
    ],
)
def test_context_is_forked_where_it_begins_as_the_prompt_does(context: tuple[int, ...], num_forked: int) -> None:
    """A shared beginning of enough tokens is taken over; the last token of both is always computed."""
    assert build_streams(PROMPT, [context])[1].num_forked_tokens == num_forked


def test_streams_have_the_labels_of_their_places() -> None:
    """The prompt is `main`, the contexts `cfg_text` and `cfg_img`."""
    assert [stream.label for stream in build_streams(PROMPT, [(1,), (2,)])] == ["main", "cfg_text", "cfg_img"]


def test_streams_that_fit_are_computed_whole() -> None:
    """With enough tokens every stream is computed to its end, what was generated included."""
    streams = build_streams((1, 2, 3), [(4, 5)])
    assert share_tokens(1, streams, 2, 9).num_tokens == (5, 4)


def test_last_tokens_of_all_streams_are_computed_in_one_step() -> None:
    """Where not all fit, each stream keeps its last token for the step that chooses the next one."""
    streams = build_streams((1, 2, 3), [(4, 5)])
    assert share_tokens(1, streams, 0, 4).num_tokens == (2, 1)
    assert share_tokens(1, streams, 0, 1).num_tokens == (1, 0)


def test_last_tokens_can_be_kept() -> None:
    """Samples are forked before the last token."""
    streams = build_streams((1, 2, 3), [(4, 5)])
    assert share_tokens(1, streams, 0, 50, keeps_last=True).num_tokens == (2, 1)


def test_prompt_holds_still_where_a_context_is_forked_from_it() -> None:
    """The prompt stops there; then the fork comes, and both go on."""
    streams = build_streams(PROMPT, [(*range(12), 99, 98)])
    assert share_tokens(7, streams, 0, 50) == ((12, 0), ())
    assert share_tokens(7, streams, 0, 10) == ((10, 0), ())
    streams[0].num_computed_tokens = 12
    fork = StreamFork(7, "main", "cfg_text", 12)
    assert share_tokens(7, streams, 0, 50) == ((8, 2), (fork,))
    assert share_tokens(7, streams, 0, 3) == ((3, 0), (fork,))
    assert find_start(streams[1], (fork,)) == 12


def test_contexts_are_forked_one_after_the_other() -> None:
    """The prompt stops for each of them; one that is not forked does not wait."""
    streams = build_streams(PROMPT, [PROMPT[:17], (*range(9), 99)])
    assert share_tokens(1, streams, 0, 50) == ((9, 0, 0), ())
    streams[0].num_computed_tokens = 9
    assert share_tokens(1, streams, 0, 50) == ((7, 0, 0), (StreamFork(1, "main", "cfg_img", 9),))
    own = build_streams(PROMPT, [PROMPT[:17], (50, 51, 52)])
    assert share_tokens(1, own, 0, 50) == ((16, 0, 2), ())


def test_fork_waits_for_a_step_that_computes_something() -> None:
    """Without tokens to compute there is no step, and so no fork."""
    streams = build_streams(PROMPT, [(*range(12), 99, 98)])
    streams[0].num_computed_tokens = 12
    assert share_tokens(1, streams, 0, 0) == ((0, 0), ())

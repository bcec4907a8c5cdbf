"""Rules of the further contexts and the samples that a request may have."""

import pytest

from engine_service.errors import InvalidRequestError, RequestTooLargeError
from engine_service.guidance_checks import check_places, settle_guided_tokens
from engine_service.request import GenerationSpec, GuidanceContext, StoppingParams
from engine_service.validation import EngineLimits

# 10 usable pages of 4 tokens.
LIMITS = EngineLimits(vocab_size=100, max_context_tokens=30, page_size=4, num_pages=11)


def _make_spec(
    num_prompt_tokens: int, *contexts: tuple[int, ...], max_tokens: int | None = 8, num_samples: int = 1
) -> GenerationSpec:
    return GenerationSpec(
        "r",
        (1,) * num_prompt_tokens,
        stopping=StoppingParams(max_tokens=max_tokens),
        guidance=tuple(GuidanceContext(context, 1.5) for context in contexts),
        num_samples=num_samples,
    )


def _settle(spec: GenerationSpec, max_tokens: int = 8) -> int:
    return settle_guided_tokens(
        spec, max_tokens, LIMITS, ["guidance[0].text", "guidance[1].text"][: len(spec.guidance)]
    )


@pytest.mark.parametrize(
    ("contexts", "field", "rule"),
    [
        (((2,), ()), "guidance[1].text", "empty"),
        (((2, 100),), "guidance[0].text", "100, at place 1"),
        (((2,), (-1,)), "guidance[1].text", "-1"),
        (((2,) * 30,), "guidance[0].text", "no room"),
    ],
)
def test_context_that_breaks_a_rule_is_named(contexts: tuple[tuple[int, ...], ...], field: str, rule: str) -> None:
    """The field is what the caller calls it, the rule says what is wrong."""
    with pytest.raises(InvalidRequestError, match=rule) as caught:
        _settle(_make_spec(3, *contexts))
    assert caught.value.field == field


def test_longest_context_decides_how_many_tokens_may_follow() -> None:
    """Every context gets every token, so the one with the least room bounds them all."""
    assert _settle(_make_spec(3, (2,) * 25)) == 5
    assert _settle(_make_spec(3)) == 8


def test_contexts_have_to_fit_the_cache_together() -> None:
    """13 + 7 tokens and 16 + 7 take 5 and 6 pages of 10: a token less is refused no more."""
    with pytest.raises(RequestTooLargeError, match="11 pages") as caught:
        _settle(_make_spec(13, (2,) * 17))
    assert caught.value.field == "stopping.max_tokens"
    with pytest.raises(RequestTooLargeError) as caught:
        _settle(_make_spec(25, (2,) * 25))
    assert caught.value.field == "guidance"
    assert _settle(_make_spec(13, (2,) * 17, max_tokens=4), 4) == 4


def test_shared_pages_count_once() -> None:
    """A context that begins as the prompt does needs pages for what is its own."""
    assert _settle(_make_spec(17, (*(1,) * 16, 2))) == 8


def test_default_of_max_tokens_is_cut_to_what_fits() -> None:
    """Who does not say how many tokens gets as many as there is room for."""
    assert _settle(_make_spec(13, (2,) * 17, max_tokens=None)) == 4


def test_samples_and_contexts_have_to_run_at_once() -> None:
    """Each context of each sample takes a place."""
    check_places(_make_spec(1, (2,), (3,), num_samples=2), 6)
    with pytest.raises(InvalidRequestError, match="2 samples of 3 contexts") as caught:
        check_places(_make_spec(1, (2,), (3,), num_samples=2), 5)
    assert caught.value.field == "n"
    with pytest.raises(InvalidRequestError) as caught:
        check_places(_make_spec(1, (2,), (3,)), 2)
    assert caught.value.field == "guidance"

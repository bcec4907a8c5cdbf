"""Rules of counting pages: what several streams share counts once."""

from engine_service.page_counts import count_held_pages, count_pages
from engine_service.request import GenerationSpec, GuidanceContext, Request
from engine_service.validation import EngineLimits

LIMITS = EngineLimits(1_000, 1_000, page_size=4, num_pages=100)
PROMPT = tuple(range(22))


def _make_samples(num_samples: int, *contexts: tuple[int, ...]) -> list[Request]:
    guidance = tuple(GuidanceContext(context, 1.5) for context in contexts)
    requests = [Request(GenerationSpec("r", PROMPT, guidance=guidance), 1 + n, 50) for n in range(num_samples)]
    for request in requests[1:]:
        request.follow(requests[0])
    return requests


def test_contexts_count_without_what_they_share_with_the_prompt() -> None:
    """22 tokens take 6 pages; 14 tokens take 4, of which 2 are the prompt's; 3 take one."""
    (request,) = _make_samples(1, (*PROMPT[:11], 90, 91, 92), (1, 2, 3))
    assert count_pages(request, LIMITS) == 6 + 2 + 1


def test_samples_that_are_still_to_be_forked_count_with_the_first() -> None:
    """Each will need the pages that 21 tokens do not fill."""
    assert count_pages(_make_samples(4)[0], LIMITS) == 5 + 4


def test_forked_samples_share_the_pages_they_share() -> None:
    """Whoever of them is left, the shared pages count once."""
    samples = _make_samples(3)
    for sample in samples:
        sample.is_running = True
        sample.leave_samples()
        sample.shared_with, sample.num_shared_tokens = 1, (21,)
    assert count_held_pages(samples, LIMITS) == 5 + 3
    assert count_held_pages(samples[1:], LIMITS) == 5 + 2
    plain = _make_samples(1)
    assert count_held_pages([*samples, *plain], LIMITS) == 5 + 3 + 6

"""Rules of requests with further contexts and with several samples, in the engine's loop on a toy model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.request import FinishReason, Request
from tests.engine_service.toy_engine import Caller, ToyEngine, generate_toy_tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
# One begins as the prompt does, the other does not.
CONTEXTS = [[*PROMPT[:10], 40, 41, 42], [7]]


def _is_back(toy: ToyEngine) -> bool:
    return toy.planner.num_free_pages == toy.limits.num_usable_pages


@pytest.mark.parametrize("num_contexts", [1, 2])
def test_token_goes_into_every_context(num_contexts: int) -> None:
    """What is chosen depends on all contexts, and each of them gets it."""
    toy = ToyEngine()
    contexts = CONTEXTS[:num_contexts]
    ((_, caller),) = toy.add_samples(PROMPT, 9, 1, contexts)
    toy.run_until_idle()
    assert caller.token_ids == generate_toy_tokens(PROMPT, 9, contexts)
    assert _is_back(toy)


def test_guided_and_plain_requests_share_batches() -> None:
    """Each gets the tokens it would get alone."""
    toy = ToyEngine()
    ((_, guided),) = toy.add_samples(PROMPT, 12, 1, CONTEXTS)
    plain = toy.add(PROMPT, 10)[1]
    toy.run_until_idle()
    assert [1, 1] in toy.executor.batches
    assert guided.token_ids == generate_toy_tokens(PROMPT, 12, CONTEXTS)
    assert plain.token_ids == generate_toy_tokens(PROMPT, 10)


def test_context_that_begins_as_the_prompt_does_is_forked() -> None:
    """The shared tokens are computed once: the steps' tokens add up to less by as many."""
    toy = ToyEngine(page_size=4)
    toy.add_samples(PROMPT, 2, 1, CONTEXTS[:1])
    while not toy.executor.num_computed_tokens > 10:
        toy.tick()
    assert toy.executor.num_computed_tokens == len(PROMPT) + len(CONTEXTS[0]) - 10
    # 12 tokens on 3 pages, and 13 on 4, of which the first 2 are the prompt's.
    assert toy.limits.num_usable_pages - toy.planner.num_free_pages == 3 + 2
    assert toy.scheduler.num_pages_held == 3 + 1 + 2, "the next token of the prompt takes a page more"


def test_samples_share_one_prefill_and_its_full_pages() -> None:
    """Of n samples one computes the prompt; the others compute its last token and hold their own tails."""
    toy = ToyEngine(page_size=4, max_step_tokens=64)
    prompt = list(range(22))
    added = toy.add_samples(prompt, 3, 4)
    toy.tick()
    assert toy.executor.batches == [[21]]
    toy.tick()
    assert toy.executor.batches[1:] == [[1, 1, 1, 1]]
    # 22 tokens fill 5 pages, and each sample has a sixth of its own.
    assert toy.limits.num_usable_pages - toy.planner.num_free_pages == 5 + 4
    assert toy.scheduler.num_pages_held == 5 + 4
    toy.run_until_idle()
    for _, caller in added:
        assert caller.token_ids == generate_toy_tokens(prompt, 3)
    assert added[0][1].ended.num_cached_tokens == 0
    assert added[1][1].ended.num_cached_tokens == 21
    assert _is_back(toy)


def test_samples_of_a_prompt_of_one_token_need_no_fork() -> None:
    """There is nothing to share: each sample computes the token."""
    toy = ToyEngine()
    added = toy.add_samples([5], 4, 3)
    toy.run_until_idle()
    assert toy.executor.batches[0] == [1, 1, 1]
    assert [caller.token_ids for _, caller in added] == [generate_toy_tokens([5], 4)] * 3


def test_samples_that_do_not_fit_together_run_one_after_another() -> None:
    """Where pages are short for the tails the youngest samples are put back, and computed by themselves later."""
    toy = ToyEngine(page_size=4, num_pages=6, max_step_tokens=64)
    added = toy.add_samples(list(range(12)), 6, 4)
    toy.run_until_idle()
    assert [caller.token_ids for _, caller in added] == [generate_toy_tokens(list(range(12)), 6)] * 4
    assert toy.read_metric("ringplan_preemptions_total") > 0
    assert _is_back(toy)


def test_samples_wait_for_room_for_all_of_them() -> None:
    """Samples count as that many requests, contexts included, and start together."""
    toy = ToyEngine(max_running_requests=4)
    toy.add([1], 5)
    toy.add_samples([2, 3], 2, 2, [[4]])
    toy.tick()
    assert (len(toy.scheduler.running), toy.scheduler.num_waiting) == (1, 2)
    toy.run_until_idle()
    assert _is_back(toy)


def test_sample_that_ends_leaves_the_others() -> None:
    """The first sample may be aborted before the others are forked from it, or after: they go on."""
    for num_ticks in range(4):
        toy = ToyEngine(max_step_tokens=8)
        added = toy.add_samples(PROMPT, 5, 3, CONTEXTS[:1])
        for _ in range(num_ticks):
            toy.tick()
        toy.loop.abort(added[0][0])
        toy.run_until_idle()
        assert added[0][1].ended.finish_reason is FinishReason.ABORT
        for _, caller in added[1:]:
            assert caller.token_ids == generate_toy_tokens(PROMPT, 5, CONTEXTS[:1])
        assert _is_back(toy)


def test_failed_step_fails_the_samples_that_were_in_it() -> None:
    """The others are computed later, from the prompt on."""
    toy = ToyEngine(max_step_tokens=8)
    added = toy.add_samples(PROMPT, 5, 3)
    toy.executor.failure = RuntimeError("no memory")
    toy.run_until_idle()
    assert [len(caller.token_ids) for _, caller in added] == [0, 5, 5]
    assert _is_back(toy)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_history_gives_every_sample_its_own_tokens(data: st.DataObject) -> None:
    """Whatever joins, is aborted, runs short or loses its planner: tokens are right, and every page comes back."""
    page_size = data.draw(st.sampled_from([1, 3, 4]), "page_size")
    max_running = data.draw(st.integers(6, 9), "max_running_requests")
    toy = ToyEngine(
        page_size=page_size,
        num_pages=1 + 3 * -(-24 // page_size) + data.draw(st.integers(0, 12), "spare pages"),
        max_running_requests=max_running,
        max_step_tokens=max_running + data.draw(st.integers(0, 9), "spare tokens"),
    )
    asked: list[tuple[list[int], int, list[list[int]], Request, Caller]] = []
    aborted: set[Request] = set()
    for _ in range(data.draw(st.integers(1, 25), "ticks")):
        match data.draw(st.sampled_from(["add", "add", "tick", "tick", "abort", "lose"]), "what"):
            case "add":
                prompt = data.draw(st.integers(1, len(PROMPT)).map(lambda n: PROMPT[:n]), "prompt")
                contexts = data.draw(st.sampled_from([[], CONTEXTS[:1], CONTEXTS, CONTEXTS[1:]]), "contexts")
                num_samples = data.draw(st.integers(1, 3 if len(contexts) < 2 else 2), "num_samples")
                num_tokens = data.draw(st.integers(1, 7), "num_tokens")
                added = toy.add_samples(prompt, num_tokens, num_samples, contexts)
                asked += [(prompt, num_tokens, contexts, *one) for one in added]
            case "abort" if asked:
                request = data.draw(st.sampled_from(asked), "request")[3]
                if request in toy.ledger:
                    aborted.add(request)
                toy.loop.abort(request)
            case "lose":
                toy.planner.is_lost = True
        toy.now += toy.tick()
    toy.run_until_idle()
    for prompt, num_tokens, contexts, request, caller in asked:
        expected = generate_toy_tokens(prompt, num_tokens, contexts)
        assert caller.is_told_of_end
        if request in aborted:
            assert caller.token_ids == expected[: len(caller.token_ids)]
        else:
            assert caller.token_ids == expected
    assert _is_back(toy)

"""Rules of the engine's loop, on a toy model whose every token depends on all tokens before it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.answer import AnswerBuilder
from engine_service.errors import StepFailedError
from engine_service.loop import IDLE_CHECK_SECONDS
from engine_service.request import FinishReason, GenerationFailed, Request, StoppingParams
from tests.engine_service.toy_engine import Caller, ToyEngine, generate_toy_tokens


def test_requests_of_different_lengths_get_their_own_tokens() -> None:
    """Requests that join and leave one batch each get the tokens they would get alone."""
    toy = ToyEngine()
    asked = [([1, 2, 3], 5), ([4], 9), (list(range(30)), 2), ([5, 5], 1)]
    callers = [toy.add(prompt, num_tokens)[1] for prompt, num_tokens in asked]
    toy.run_until_idle()
    for (prompt, num_tokens), caller in zip(asked, callers, strict=True):
        assert caller.token_ids == generate_toy_tokens(prompt, num_tokens)
        assert caller.ended.finish_reason is FinishReason.LENGTH
        assert (caller.ended.num_prompt_tokens, caller.ended.num_completion_tokens) == (len(prompt), num_tokens)


def test_running_requests_decode_while_a_long_prompt_goes_in() -> None:
    """A prompt longer than a step's tokens is prefilled in chunks, beside a row of each running request."""
    toy = ToyEngine(max_step_tokens=16)
    toy.add([1], 10)
    toy.tick()
    toy.add(list(range(40)), 1)
    toy.run_until_idle()
    assert toy.executor.batches[:5] == [[1], [1, 15], [1, 15], [1, 10], [1]]


def test_every_page_is_back_when_all_requests_have_ended() -> None:
    """A finished request gives up its pages."""
    toy = ToyEngine()
    toy.add([1, 2, 3], 20)
    toy.add([4, 5], 3)
    toy.run_until_idle()
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages
    assert sorted(toy.executor.forgotten) == [1, 2]


def test_aborted_request_frees_its_pages_and_is_told_so() -> None:
    """An abort ends a running request after the step it is in; its pages are free at once."""
    toy = ToyEngine()
    request, caller = toy.add([1, 2, 3], 100)
    toy.tick()
    toy.loop.abort(request)
    toy.tick()
    assert caller.ended.finish_reason is FinishReason.ABORT
    assert caller.ended.num_completion_tokens == 1
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages


def test_waiting_request_can_be_aborted() -> None:
    """A request that has not run yet ends without ever running."""
    toy = ToyEngine(max_running_requests=1, max_step_tokens=4)
    toy.add([1], 3)
    request, caller = toy.add([2], 3)
    toy.tick()
    toy.loop.abort(request)
    toy.run_until_idle()
    assert caller.ended.num_completion_tokens == 0
    toy.loop.abort(request)
    assert caller.is_told_of_end, "a second abort changes nothing"


def test_out_of_pages_puts_the_youngest_back_and_changes_no_token() -> None:
    """When pages run out the youngest request is recomputed later; every caller still gets the right tokens."""
    toy = ToyEngine(page_size=2, num_pages=11)
    asked = [([1, 2], 14), ([3, 4], 14), ([5, 6], 14)]
    callers = [toy.add(prompt, num_tokens)[1] for prompt, num_tokens in asked]
    toy.run_until_idle()
    assert toy.read_metric("ringplan_preemptions_total") > 0
    for (prompt, num_tokens), caller in zip(asked, callers, strict=True):
        assert caller.token_ids == generate_toy_tokens(prompt, num_tokens)
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages


def test_requests_end_in_order_of_arrival_when_only_one_fits() -> None:
    """The oldest request is never put back, so that it ends first however tight the pool is."""
    toy = ToyEngine(page_size=1, num_pages=13)
    callers = [toy.add([1, 2], 11)[1] for _ in range(3)]
    ended: list[int] = []
    while len(toy.ledger):
        toy.tick()
        ended += [
            number for number, caller in enumerate(callers, start=1) if caller.is_told_of_end and number not in ended
        ]
    assert ended == [1, 2, 3]


def test_request_that_cannot_get_pages_even_alone_fails() -> None:
    """Where the planner has fewer pages than the engine believes, the request fails and the loop goes on."""
    toy = ToyEngine(page_size=4, num_pages=9)
    toy.planner.stored["leak"] = [0] * 28
    caller = toy.add(list(range(12)), 2)[1]
    toy.run_until_idle()
    assert isinstance(caller.events[-1], GenerationFailed)
    assert "1 are free" in str(caller.events[-1].error)
    toy.planner.drop("leak")
    second = toy.add([1], 2)[1]
    toy.run_until_idle()
    assert second.token_ids == generate_toy_tokens([1], 2)


def test_failed_step_fails_its_requests_and_no_other() -> None:
    """An exception in the model ends the step's requests with an error; requests that come later run."""
    toy = ToyEngine()
    caller = toy.add([1, 2], 5)[1]
    toy.tick()
    toy.executor.failure = RuntimeError("no memory")
    toy.tick()
    last = caller.events[-1]
    assert isinstance(last, GenerationFailed)
    assert isinstance(last.error, StepFailedError)
    assert "no memory" in str(last.error)
    later = toy.add([3], 4)[1]
    toy.run_until_idle()
    assert later.token_ids == generate_toy_tokens([3], 4)
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages
    assert toy.read_metric("ringplan_steps_failed_total") == 1


def test_answer_that_cannot_be_opened_fails_alone() -> None:
    """An exception over one request's answer ends that request; the loop and the others go on."""
    toy = ToyEngine()
    good_open = toy.open_answer

    def open_answer(request: Request) -> AnswerBuilder:
        if request.arrival == 1:
            raise ValueError("bad")
        return good_open(request)

    toy.open_answer = open_answer
    bad, good = toy.add([1], 2)[1], toy.add([2], 2)[1]
    toy.run_until_idle()
    toy.ledger.deliver()
    assert isinstance(bad.events[-1], GenerationFailed)
    assert good.token_ids == generate_toy_tokens([2], 2)


def test_end_of_sequence_token_ends_a_request() -> None:
    """The model's own end is a stop; the token is counted and told of, its text is not returned."""
    prompt = [3, 1]
    tokens = generate_toy_tokens(prompt, 6)
    eos = tokens[3]
    toy = ToyEngine(eos_token_ids=[eos])
    caller = toy.add(prompt, 50)[1]
    ignoring = toy.add(prompt, 6, StoppingParams(ignore_eos=True))[1]
    toy.run_until_idle()
    assert caller.token_ids == tokens[:4]
    assert caller.text == "".join(f"{token} " for token in tokens[:3])
    assert caller.ended.finish_reason is FinishReason.STOP
    assert caller.ended.matched_token_id == eos
    assert ignoring.token_ids == tokens


def test_lost_planner_costs_callers_a_pause_and_no_token() -> None:
    """Running requests wait for a new session and are prefilled again from prompt and generated tokens."""
    toy = ToyEngine()
    asked = [([1, 2, 3], 8), ([9], 8)]
    callers = [toy.add(prompt, num_tokens)[1] for prompt, num_tokens in asked]
    for _ in range(3):
        toy.tick()
    toy.planner.is_lost = toy.planner.is_away = True
    assert toy.tick() == 0
    assert toy.readiness == [True, False]
    assert 0 < toy.tick() <= 1.0, "the first wait is at most a second"
    toy.now += 1.0
    assert toy.tick() > 0, "the planner is still away"
    toy.planner.is_away = False
    toy.run_until_idle()
    assert toy.readiness == [True, False, True]
    for (prompt, num_tokens), caller in zip(asked, callers, strict=True):
        assert caller.token_ids == generate_toy_tokens(prompt, num_tokens)
    assert toy.read_metric("ringplan_planner_lost_total") == 1


def test_request_can_be_aborted_while_the_planner_is_away() -> None:
    """An abort does not wait for the planner."""
    toy = ToyEngine()
    request, caller = toy.add([1], 8)
    toy.tick()
    toy.planner.is_lost = toy.planner.is_away = True
    toy.tick()
    toy.loop.abort(request)
    toy.ledger.deliver()
    assert caller.ended.finish_reason is FinishReason.ABORT


def test_idle_loop_sends_what_is_left_and_then_rests() -> None:
    """With nothing to run the loop flushes, so that pages are not kept, and asks to be left alone for a while."""
    toy = ToyEngine()
    toy.add([1], 1)
    toy.tick()
    num_flushes = toy.planner.num_flushes
    assert toy.tick() == IDLE_CHECK_SECONDS
    assert toy.planner.num_flushes == num_flushes + 1
    assert len(toy.executor.batches) == 1


def test_idle_loop_notices_a_lost_planner() -> None:
    """An engine with nothing to do turns not-ready when its planner is gone."""
    toy = ToyEngine()
    toy.tick()
    toy.planner.is_lost = True
    toy.tick()
    assert toy.readiness == [True, False]


@pytest.mark.parametrize("error", [None, StepFailedError("the engine has failed")])
def test_end_of_the_loop_tells_every_caller(error: StepFailedError | None) -> None:
    """When the loop ends, requests that run and wait end with it: aborted, or with what made the engine fail."""
    toy = ToyEngine(max_running_requests=1, max_step_tokens=4)
    callers = [toy.add([1], 50)[1] for _ in range(2)]
    toy.tick()
    toy.loop.end(error)
    toy.ledger.deliver()
    for caller in callers:
        if error is None:
            assert caller.ended.finish_reason is FinishReason.ABORT
        else:
            assert caller.events[-1] == GenerationFailed(error)
    assert not toy.planner.is_connected
    assert toy.readiness == [True, False]


@settings(max_examples=60)
@given(data=st.data())
def test_any_history_gives_every_request_its_own_tokens(data: st.DataObject) -> None:
    """Whatever joins, is aborted, runs short or loses its planner: tokens are right, and every page comes back."""
    page_size = data.draw(st.sampled_from([1, 3, 4]), "page_size")
    max_running = data.draw(st.integers(1, 4), "max_running_requests")
    toy = ToyEngine(
        page_size=page_size,
        num_pages=1 + -(-14 // page_size) + data.draw(st.integers(0, 6), "spare pages"),
        max_running_requests=max_running,
        max_step_tokens=max_running + data.draw(st.integers(0, 5), "spare tokens"),
    )
    asked: list[tuple[list[int], int, Request, Caller]] = []
    aborted: set[Request] = set()
    for _ in range(data.draw(st.integers(1, 25), "ticks")):
        match data.draw(st.sampled_from(["add", "add", "tick", "tick", "abort", "lose"]), "what"):
            case "add":
                prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=8), "prompt")
                num_tokens = data.draw(st.integers(1, 7), "num_tokens")
                asked.append((prompt, num_tokens, *toy.add(prompt, num_tokens)))
            case "abort" if asked:
                request = data.draw(st.sampled_from(asked), "request")[2]
                if request in toy.ledger:
                    aborted.add(request)
                toy.loop.abort(request)
            case "lose":
                toy.planner.is_lost = True
        toy.now += toy.tick()
    toy.run_until_idle()
    for prompt, num_tokens, request, caller in asked:
        expected = generate_toy_tokens(prompt, num_tokens)
        assert caller.is_told_of_end
        if request in aborted:
            assert caller.token_ids == expected[: len(caller.token_ids)]
        else:
            assert caller.token_ids == expected
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages

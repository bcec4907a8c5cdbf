"""Rules of the request ledger: who is told what, and when."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from engine_service.answer import AnswerBuilder
from engine_service.errors import StepFailedError
from engine_service.ledger import RequestLedger
from engine_service.metrics import EngineMetrics
from engine_service.request import (
    FinishReason,
    GeneratedDelta,
    GenerationEvent,
    GenerationFailed,
    GenerationSpec,
    OnEvent,
    PromptComputed,
    Request,
)
from engine_service.sampling_params import SampledToken
from tests.engine_service.toy_engine import Caller, ToyDetokenizer


class Delivery:
    """Gathers deliveries instead of making them."""

    def __init__(self) -> None:
        self.batches: list[Sequence[tuple[OnEvent, GenerationEvent]]] = []

    def __call__(self, events: Sequence[tuple[OnEvent, GenerationEvent]]) -> None:
        """Takes a delivery."""
        self.batches.append(events)


def _open_answer(request: Request) -> AnswerBuilder:
    if request.spec.request_id == "bad":
        raise ValueError("cannot be decoded")
    return AnswerBuilder(request, ToyDetokenizer(), [])


@pytest.fixture
def delivery() -> Delivery:
    """Where events go."""
    return Delivery()


@pytest.fixture
def ledger(delivery: Delivery) -> RequestLedger:
    """A ledger whose time stands still."""
    return RequestLedger(lambda: 1.0, EngineMetrics(CollectorRegistry()), _open_answer, delivery)


def _make_request(arrival: int, request_id: str = "r", max_tokens: int = 2) -> Request:
    return Request(GenerationSpec(request_id, (1,)), arrival, max_tokens)


def test_events_of_a_step_are_delivered_together(ledger: RequestLedger, delivery: Delivery) -> None:
    """Two requests' events make one delivery, in the order in which they came; nothing new makes none."""
    callers = [Caller(), Caller()]
    requests = [_make_request(1), _make_request(2)]
    for request, caller in zip(requests, callers, strict=True):
        assert ledger.open(request, caller.events.append, 0.0)
        assert ledger.append(request, SampledToken(5)) is None
    ledger.deliver()
    ledger.deliver()
    assert [len(batch) for batch in delivery.batches] == [2]


def test_end_that_a_token_brings_is_told_when_the_request_is_closed(ledger: RequestLedger, delivery: Delivery) -> None:
    """The delta comes first, the end last, and the request is gone."""
    caller, request = Caller(), _make_request(1, max_tokens=1)
    ledger.open(request, caller.events.append, 0.0)
    ended = ledger.append(request, SampledToken(5))
    assert ended is not None
    ledger.close(request, ended)
    assert request not in ledger
    ledger.deliver()
    for on_event, event in delivery.batches[0]:
        on_event(event)
    assert caller.token_ids == [5]
    assert caller.ended.finish_reason is FinishReason.LENGTH


def test_answer_that_cannot_be_made_is_told_to_its_caller(ledger: RequestLedger, delivery: Delivery) -> None:
    """A request that cannot be taken in never enters the ledger."""
    caller, request = Caller(), _make_request(1, "bad")
    assert not ledger.open(request, caller.events.append, 0.0)
    assert request not in ledger
    ledger.deliver()
    ((_, event),) = delivery.batches[0]
    assert isinstance(event, GenerationFailed)
    assert isinstance(event.error, StepFailedError)


def test_log_of_an_end_carries_the_requests_figures(ledger: RequestLedger, caplog: pytest.LogCaptureFixture) -> None:
    """A log collector can find a request by its id."""
    request = _make_request(1, "order-66")
    ledger.open(request, Caller().events.append, 0.25)
    ledger.append(request, SampledToken(5))
    with caplog.at_level("INFO", "engine_service.ledger"):
        ledger.close(request, None)
    (record,) = caplog.records
    members = vars(record)
    assert (members["request_id"], members["finish_reason"]) == ("order-66", "abort")
    assert (members["prompt_tokens"], members["completion_tokens"], members["duration_seconds"]) == (1, 1, 0.75)
    assert members["cached_tokens"] == 0
    assert "error" not in members


def test_log_of_a_failure_says_what_failed(ledger: RequestLedger, caplog: pytest.LogCaptureFixture) -> None:
    """With the id of the request; so does that of one that cannot be taken in."""
    request = _make_request(1, "order-66")
    ledger.open(request, Caller().events.append, 0.25)
    with caplog.at_level("INFO", "engine_service.ledger"):
        ledger.close(request, StepFailedError("the step failed: no memory"))
        ledger.open(_make_request(2, "bad"), Caller().events.append, 0.25)
    members = [vars(record) for record in caplog.records]
    assert [one["request_id"] for one in members] == ["order-66", "bad"]
    assert members[0]["error"] == "the step failed: no memory"


def test_prompt_is_told_of_before_the_first_token_and_only_once(ledger: RequestLedger, delivery: Delivery) -> None:
    """With what is known of its log-probabilities, and only to a caller who asked."""
    spec = GenerationSpec("r", (1, 2), num_prompt_logprobs=0)
    asked, other = Request(spec, 1, 5), _make_request(2, max_tokens=5)
    asked.prompt_logprobs.append(SampledToken(2, -0.5))
    callers = [Caller(), Caller()]
    for request, caller in zip((asked, other), callers, strict=True):
        ledger.open(request, caller.events.append, 0.0)
        ledger.append(request, SampledToken(5))
        ledger.append(request, SampledToken(6))
    ledger.deliver()
    for on_event, event in delivery.batches[0]:
        on_event(event)
    kinds = [[type(event) for event in caller.events] for caller in callers]
    assert kinds == [[PromptComputed, GeneratedDelta, GeneratedDelta], [GeneratedDelta, GeneratedDelta]]
    assert callers[0].events[0] == PromptComputed((SampledToken(2, -0.5),))

"""The engine as other threads see it: requests in, events out, and the thread between."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from engine_service.errors import EngineError, EngineStoppingError, QueueFullError, StepFailedError
from engine_service.guidance_checks import check_places, settle_guided_tokens
from engine_service.ledger import RequestLedger
from engine_service.loop import EngineLoad, EngineLoop
from engine_service.metrics import EngineMetrics
from engine_service.request import GenerationEvent, GenerationSpec, OnEvent, Request
from engine_service.validation import EngineLimits, check_min_tokens, check_token_ids, settle_max_tokens

_logger = logging.getLogger(__name__)


# Takes an event of one of several samples: its number and the event.
OnSampleEvent = Callable[[int, GenerationEvent], None]


class _Arrival(NamedTuple):
    request: Request
    on_event: OnEvent
    arrived_at: float


class Engine:
    """Runs requests. Every method may be called from any thread.

    Args:
        limits: what the model and the KV cache can take.
        loop: the work of the engine's thread.
        ledger: the loop's requests.
        metrics: the engine's metrics.
        max_running_requests: requests that may run at once.
        max_queued_requests: requests that may wait beside them.
        on_ended: told, in the engine's thread, that it has ended.
        clock: tells seconds, as the loop's does.

    Attributes:
        limits: what the model and the KV cache can take.
        failure: what ended the engine's thread, or None if it has not failed.
    """

    def __init__(
        self,
        limits: EngineLimits,
        loop: EngineLoop,
        ledger: RequestLedger,
        metrics: EngineMetrics,
        *,
        max_running_requests: int,
        max_queued_requests: int,
        on_ended: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.failure: Exception | None = None
        self._loop = loop
        self._ledger = ledger
        self._metrics = metrics
        self._max_queued_requests = max_queued_requests
        self._max_running_requests = max_running_requests
        self._max_unfinished_requests = max_running_requests + max_queued_requests
        self._on_ended = on_ended
        self._clock = clock
        # Guards everything below.
        self._changed = threading.Condition()
        self._arrivals: list[_Arrival] = []
        self._aborts: list[Request] = []
        self._num_arrived = 0
        self._num_in_loop = 0
        self._is_accepting = True
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ringplan-engine", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """How much there is to do; what came since the last step began counts as waiting."""
        with self._changed:
            load = self._loop.load
            return load._replace(num_waiting=max(0, self._num_unfinished - load.num_running))

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def submit(self, spec: GenerationSpec, on_event: OnEvent, *, prompt_field: str = "token_ids") -> Request:
        """Takes in a request for one sample; see `submit_samples`."""
        assert spec.num_samples == 1, "several samples need submit_samples"
        (request,) = self.submit_samples(spec, lambda _sample, event: on_event(event), prompt_field=prompt_field)
        return request

    def submit_samples(
        self,
        spec: GenerationSpec,
        on_event: OnSampleEvent,
        *,
        prompt_field: str = "token_ids",
        context_fields: Sequence[str] | None = None,
    ) -> tuple[Request, ...]:
        """Takes in a request.

        Args:
            spec: what is asked for.
            on_event: gets the number of a sample and an event of it; each sample's last event ends it.
            prompt_field: what the caller calls the prompt, for errors.
            context_fields: what it calls the further contexts.

        Returns:
            A request for each sample, for `abort`.

        Raises:
            InvalidRequestError: it breaks a rule, or could never fit.
            QueueFullError: as many requests wait as the queue holds.
            EngineStoppingError: the engine takes no more requests.
        """
        check_token_ids(spec.prompt_token_ids, self.limits, prompt_field)
        check_token_ids(spec.stopping.stop_token_ids, self.limits, "stopping.stop_token_ids")
        check_token_ids([token_id for token_id, _ in spec.sampling.logit_bias], self.limits, "sampling.logit_bias")
        max_tokens = settle_max_tokens(len(spec.prompt_token_ids), spec.stopping.max_tokens, self.limits, prompt_field)
        if context_fields is None:
            context_fields = [f"guidance[{number}].token_ids" for number in range(len(spec.guidance))]
        max_tokens = settle_guided_tokens(spec, max_tokens, self.limits, context_fields)
        check_min_tokens(spec.stopping.min_tokens, max_tokens)
        check_places(spec, self._max_running_requests)
        with self._changed:
            if not self._is_accepting:
                raise EngineStoppingError
            if self._num_unfinished + spec.num_samples > self._max_unfinished_requests:
                self._metrics.request_refused()
                raise QueueFullError(self._max_queued_requests)
            requests: list[Request] = []
            for number, sample in enumerate(spec.split_samples()):
                self._num_arrived += 1
                request = Request(sample, self._num_arrived, max_tokens)
                if requests:
                    request.follow(requests[0])
                requests.append(request)
                self._arrivals.append(_Arrival(request, partial(on_event, number), self._clock()))
            self._changed.notify_all()
        return tuple(requests)

    def abort(self, request: Request) -> None:
        """Ends a request before its time, after the step it is in; does nothing if it has ended."""
        with self._changed:
            self._aborts.append(request)
            self._changed.notify_all()

    def stop_accepting(self) -> None:
        """Refuses new requests from now on."""
        with self._changed:
            self._is_accepting = False

    def wait_until_finished(self, timeout_seconds: float) -> bool:
        """Waits until no request is left.

        Args:
            timeout_seconds: how long to wait at most.

        Returns:
            Whether no request is left.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_unfinished, timeout_seconds)

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Aborts what is left and ends the engine's thread, after the step it is in. May be called again.

        Args:
            timeout_seconds: how long to wait for that at most; None waits for as long as it takes.
        """
        with self._changed:
            self._is_accepting = False
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    @property
    def _num_unfinished(self) -> int:
        return self._num_in_loop + len(self._arrivals)

    def _run(self) -> None:
        error: EngineError | None = None
        try:
            while self._take_in():
                idle_seconds = self._loop.tick()
                self._settle()
                self._wait(idle_seconds)
        except Exception as failure:
            _logger.exception("the engine has failed")
            self.failure = failure
            error = StepFailedError(f"the engine has failed: {failure!r}")
        finally:
            self._end(error)

    def _take_in(self) -> bool:
        """Hands the loop what other threads have asked for; returns False when the engine is to end."""
        with self._changed:
            if self._is_stopping:
                return False
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
            self._num_in_loop += len(arrivals)
        for arrival in arrivals:
            self._loop.add(*arrival)
        for request in aborts:
            self._loop.abort(request)
        return True

    def _settle(self) -> None:
        # The count first: a caller that learns of an end may at once send another request.
        with self._changed:
            self._num_in_loop = len(self._ledger)
            self._changed.notify_all()
        self._ledger.deliver()

    def _wait(self, seconds: float) -> None:
        if not seconds:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._arrivals or self._aborts or self._is_stopping, seconds)

    def _end(self, error: EngineError | None) -> None:
        with self._changed:
            self._is_accepting = False
            self._is_stopping = True
            arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            self._loop.add(*arrival)
        try:
            self._loop.end(error)
        finally:
            self._settle()
            self._on_ended()

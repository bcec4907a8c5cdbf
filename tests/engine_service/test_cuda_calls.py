"""What is asked of CUDA through torch, and in which order: stand-ins bind to the signatures of the installed torch."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine_service.cuda_graphs import NUM_WARM_UP_RUNS, CudaCapturer
from engine_service.plan_copies import CudaCopyEngine

CPU = torch.device("cpu")
LogLine = tuple[object, ...]


def bind(method: Callable[..., Any], *args: object, **given: object) -> None:
    """Raises TypeError unless torch's own method takes these arguments."""
    inspect.signature(method).bind(*args, **given)


class ScriptedCuda:
    """Takes torch.cuda's place; what it is asked to do goes into a log, with the stream it is done in.

    Attributes:
        log: what was asked, in order.
        names: the streams, in the order in which they came up.
        num_streams: streams made, the forward's too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[LogLine] = []
        self.names: list[str] = ["forward"]
        self.num_streams = 0
        cuda, real_graph = self, inspect.signature(torch.cuda.graph)
        real_stream, real_event = torch.cuda.Stream, torch.cuda.Event

        class Stream:
            """A stream with a name."""

            def __init__(self, device: object = None, name: str = "side") -> None:
                self.name = name
                cuda.num_streams += 1

            def wait_event(self, *args: Any) -> None:
                bind(real_stream.wait_event, self, *args)
                cuda.log.append((self.name, "waits for", args[0].name))

            def wait_stream(self, *args: Any) -> None:
                bind(real_stream.wait_stream, self, *args)
                cuda.log.append((self.name, "waits for", args[0].name))

        class Event:
            """An event with a number."""

            def __init__(self) -> None:
                self.name = "event"

            def record(self, *args: Any) -> None:
                bind(real_event.record, self, *args)
                cuda.log.append((args[0].name, "comes to", self.name))

        class CUDAGraph:
            """A graph."""

            def replay(self) -> None:
                """Notes it."""
                cuda.log.append((cuda.names[-1], "replays"))

            def pool(self) -> str:
                """Returns the pool's handle."""
                return "pool"

        forward = Stream(name="forward")

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            names = list(cuda.names)
            cuda.names.append(stream.name)
            try:
                yield
            finally:
                cuda.names[:] = names

        @contextmanager
        def capture(*args: Any, **given: Any) -> Iterator[None]:
            bound = real_graph.bind(*args, **given)
            assert isinstance(bound.arguments["cuda_graph"], CUDAGraph)
            cuda.log.append(("capture begins", bound.arguments["stream"].name, bound.arguments["pool"]))
            # The end of a capture that has failed raises, and torch then does not go back to the stream before it.
            cuda.names.append("capture")
            yield
            cuda.names.pop()

        for name, stand_in in (
            ("Stream", Stream),
            ("Event", Event),
            ("CUDAGraph", CUDAGraph),
            ("stream", use),
            ("graph", capture),
            ("current_stream", lambda _device: forward),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _self, stream: self.log.append((stream.name, "uses")))
        copy = torch.Tensor.copy_

        def note_copy(target: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
            self.log.append((self.names[-1], "copies", given))
            return copy(target, *args, **given)

        monkeypatch.setattr(torch.Tensor, "copy_", note_copy)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    """A stand-in for CUDA."""
    return ScriptedCuda(monkeypatch)


def test_a_staging_is_written_after_the_work_that_had_its_memory(cuda: ScriptedCuda) -> None:
    """The copies' stream waits for the forward's once, and torch knows that it uses the memory."""
    target = CudaCopyEngine(CPU).allocate(100)
    assert (target.shape, target.dtype) == ((100,), torch.int32)
    assert cuda.log == [("side", "waits for", "forward"), ("side", "uses")]


def test_a_copy_runs_in_its_own_stream_and_the_forward_waits_for_it(cuda: ScriptedCuda) -> None:
    """Not before what it comes after, without the host waiting, with an event behind it."""
    engine = CudaCopyEngine(CPU)
    before = engine.record()
    source, target = torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    engine.wait(engine.start(source, target, before))
    assert cuda.log == [
        ("forward", "comes to", "event"),
        ("side", "waits for", "event"),
        ("side", "copies", {"non_blocking": True}),
        ("side", "comes to", "event"),
        ("forward", "waits for", "event"),
    ]
    assert target.tolist() == [0, 1, 2, 3, 4]


def test_the_first_copy_waits_for_nothing(cuda: ScriptedCuda) -> None:
    """No forward has read its staging yet."""
    CudaCopyEngine(CPU).start(torch.zeros(1), torch.zeros(1), None)
    assert [line[1] for line in cuda.log] == ["copies", "comes to"]


def test_work_is_run_beside_the_forward_before_it_is_captured(cuda: ScriptedCuda) -> None:
    """In a stream of its own that waits for the forward's and is waited for; later captures share stream and pool."""
    streams: list[str] = []

    def run() -> torch.Tensor:
        streams.append(cuda.names[-1])
        return torch.full((1,), float(len(streams)))

    capturer = CudaCapturer(CPU)
    replay, result = capturer.capture(run)
    assert streams == ["side"] * NUM_WARM_UP_RUNS + ["capture"]
    assert result.item() == len(streams), "the result is that of the captured run"
    assert cuda.log == [
        ("side", "waits for", "forward"),
        ("forward", "waits for", "side"),
        ("capture begins", "side", None),
    ]
    replay()
    assert cuda.log.pop() == ("forward", "replays")
    capturer.capture(run)
    assert cuda.log[-1] == ("capture begins", "side", "pool")
    assert cuda.num_streams == 2, "cuBLAS keeps megabytes for each that it meets"


@pytest.mark.parametrize("num_good_runs", range(NUM_WARM_UP_RUNS + 1))
def test_what_cannot_be_captured_leaves_the_forward_in_its_stream(cuda: ScriptedCuda, num_good_runs: int) -> None:
    """Whichever run fails, later work comes after all that was put in a side stream, and in the stream of before."""
    streams: list[str] = []

    def run() -> torch.Tensor:
        streams.append(cuda.names[-1])
        if len(streams) > num_good_runs:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapturer(CPU).capture(run)
    assert cuda.names == ["forward"]
    assert cuda.log[:2] == [("side", "waits for", "forward"), ("forward", "waits for", "side")]


def test_memory_in_use_is_what_is_not_free(cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells the free bytes first, and among them are those that it only keeps for later."""
    free_bytes = [30]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free_bytes.append(40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_bytes[-1], 100))
    assert CudaCapturer(CPU).read_memory_bytes() == 60

"""`pinned_memory.py`: regions are registered when first seen and unregistered before they can be unmapped."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_service.pinned_memory import CudaRegistrar, PinnedRegions

Buffer = npt.NDArray[np.uint8]


@dataclass
class ScriptedRegistrar:
    """Registers memory, or refuses to; checks that what is unregistered is registered."""

    reason: str | None = None
    registered: dict[int, int] = field(default_factory=dict)
    num_asked: int = 0
    on_unregister: Callable[[int], None] = lambda _address: None

    def try_register(self, address: int, num_bytes: int) -> str | None:
        """Registers memory, unless there is a reason not to."""
        self.num_asked += 1
        if self.reason is None:
            assert address not in self.registered
            self.registered[address] = num_bytes
        return self.reason

    def unregister(self, address: int) -> None:
        """Undoes it."""
        self.on_unregister(address)
        del self.registered[address]


@pytest.fixture
def gauge() -> list[bool]:
    """What was told, last at the end."""
    return []


def build_buffer(num_bytes: int = 4_096) -> Buffer:
    """Returns memory like a region's."""
    return np.arange(num_bytes, dtype=np.int64).astype(np.uint8)


def test_a_region_is_registered_once_and_whole(gauge: list[bool]) -> None:
    """However many plans stand in it; its tensor is the memory itself."""
    registrar = ScriptedRegistrar()
    regions = PinnedRegions(registrar, gauge.append)
    buffer = build_buffer()
    for step_id in (1, 2, 3):
        items = regions.find(buffer, step_id)
        assert items.data_ptr() == buffer.ctypes.data
        assert (items.dtype, items.numel()) == (torch.int32, 1_024)
    assert registrar.registered == {buffer.ctypes.data: 4_096}
    assert (registrar.num_asked, gauge) == (1, [True])


def test_a_grown_region_is_registered_too_and_the_old_one_goes_after_its_last_copy(gauge: list[bool]) -> None:
    """As long as a step that was copied from it may be under way, the old region stays registered."""
    registrar = ScriptedRegistrar()
    regions = PinnedRegions(registrar, gauge.append)
    old, new = build_buffer(), build_buffer(8_192)
    regions.find(old, 4)
    regions.find(new, 5)
    assert registrar.registered == {old.ctypes.data: 4_096, new.ctypes.data: 8_192}
    regions.close_before(4)
    assert old.ctypes.data in registrar.registered
    regions.close_before(5)
    assert registrar.registered == {new.ctypes.data: 8_192}
    regions.close_before(100)
    assert registrar.registered == {new.ctypes.data: 8_192}, "the newest region stays"


def test_memory_is_held_until_it_is_unregistered(gauge: list[bool]) -> None:
    """Nobody else need hold a region: it is there when it is unregistered, and can go afterwards."""
    registrar = ScriptedRegistrar()
    regions = PinnedRegions(registrar, gauge.append)
    buffer = build_buffer()
    memory = weakref.ref(buffer)
    regions.find(buffer, 1)
    del buffer
    lived: list[bool] = []
    registrar.on_unregister = lambda _address: lived.append(memory() is not None)
    regions.close()
    assert lived == [True]
    assert memory() is None


def test_closing_unregisters_everything_and_sets_the_gauge_back(gauge: list[bool]) -> None:
    """After a session nothing is registered, and the next session's regions are registered anew."""
    registrar = ScriptedRegistrar()
    regions = PinnedRegions(registrar, gauge.append)
    first, second = build_buffer(), build_buffer()
    regions.find(first, 1)
    regions.find(second, 2)
    regions.close()
    regions.close()
    assert not registrar.registered
    assert not gauge[-1]
    regions.find(first, 1)
    assert list(registrar.registered) == [first.ctypes.data]
    assert gauge[-1]


def test_a_refusal_is_told_once_and_copies_go_on(gauge: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    """One warning that says why and what it means; the gauge is 0; every region can be read."""
    registrar = ScriptedRegistrar("operation not supported")
    regions = PinnedRegions(registrar, gauge.append)
    with caplog.at_level(logging.WARNING):
        for step_id in (1, 2):
            buffer = build_buffer()
            assert regions.find(buffer, step_id).data_ptr() == buffer.ctypes.data
        regions.close()
    (record,) = caplog.records
    assert "operation not supported" in record.getMessage()
    assert "pageable" in record.getMessage()
    assert not any(gauge)


def test_without_a_registrar_nothing_is_registered(gauge: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    """Whoever turned it off need not be warned."""
    regions = PinnedRegions(None, gauge.append)
    regions.find(build_buffer(), 1)
    regions.close()
    assert not caplog.records
    assert not any(gauge)


def test_abandoned_memory_is_never_given_up(gauge: list[bool]) -> None:
    """A copy that may still be under way must find its memory mapped, whatever becomes of the session."""
    registrar = ScriptedRegistrar()
    regions = PinnedRegions(registrar, gauge.append)
    buffer = build_buffer()
    memory, address = weakref.ref(buffer), buffer.ctypes.data
    regions.find(buffer, 1)
    regions.abandon()
    del regions, buffer
    assert memory() is not None
    assert address in registrar.registered
    assert not gauge[-1]


@dataclass
class ScriptedCudart:
    """torch's `cudart` as far as it is used here; names and forms are those of torch/csrc/cuda/shared/cudart.cpp."""

    error: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)

    class cudaError:  # noqa: N801  # Its name there.
        """The only value that the enumeration names."""

        success = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802
        """Notes the call."""
        self.calls.append(("register", ptr, size, flags))
        return self.error

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        """Notes the call."""
        self.calls.append(("unregister", ptr))
        return self.error

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        """Names the error."""
        return f"error {error}"


def test_cuda_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The address, the size and flags of 0; an error's text comes back, and one at the end is only told."""
    cudart = ScriptedCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    registrar = CudaRegistrar(torch.device("cpu"))
    assert registrar.try_register(4_096, 100) is None
    registrar.unregister(4_096)
    assert cudart.calls == [("register", 4_096, 100, 0), ("unregister", 4_096)]
    assert not caplog.records
    cudart.error = 801
    assert registrar.try_register(4_096, 100) == "error 801"
    registrar.unregister(4_096)
    (record,) = caplog.records
    assert "error 801" in record.getMessage()

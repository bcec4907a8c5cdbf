"""The ring's memory as the device reads it: registered with CUDA, so that copies run beside everything else."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_service.device_plan import ITEM_BYTES

_REGISTER_DEFAULT = 0  # cudaHostRegisterDefault

_logger = logging.getLogger(__name__)


class HostRegistrar(Protocol):
    """Tells a device of host memory that it is to read by itself."""

    def try_register(self, address: int, num_bytes: int) -> str | None:
        """Registers memory; returns None, or why that was refused."""

    def unregister(self, address: int) -> None:
        """Undoes `try_register`."""


class CudaRegistrar:
    """Registers memory with CUDA.

    Args:
        device: the GPU.

    Source: cudaHostRegister and cudaHostUnregister in the CUDA runtime API.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def try_register(self, address: int, num_bytes: int) -> str | None:
        """Registers memory; see `HostRegistrar`."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotations here.
        error = cudart.cudaHostRegister(address, num_bytes, _REGISTER_DEFAULT)
        if error == cudart.cudaError.success:
            return None
        self._clear_error()
        return str(cudart.cudaGetErrorString(error))

    def unregister(self, address: int) -> None:
        """Undoes `try_register`; see `HostRegistrar`."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotations here.
        error = cudart.cudaHostUnregister(address)
        if error != cudart.cudaError.success:
            self._clear_error()
            _logger.warning("a region stays registered with CUDA: %s", cudart.cudaGetErrorString(error))

    def _clear_error(self) -> None:
        """Takes up the error that CUDA keeps for whoever launches the next kernel, which would fail for no reason."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)


@dataclass(slots=True)
class _Region:
    """A region in use.

    Args:
        buffer: its memory; held so that it is not unmapped while it is registered.
        items: the same as a tensor, int32.
        is_pinned: whether it is registered.
        last_step: the last step whose plan was copied from it.
    """

    buffer: npt.NDArray[np.uint8]
    items: torch.Tensor
    is_pinned: bool
    last_step: int = 0


class PinnedRegions:
    """The regions of a session, registered when they are first seen and unregistered before they are unmapped.

    Used by the engine's thread alone.

    Args:
        registrar: registers them; None leaves them as they are.
        on_changed: told whether the newest region is registered, when that changes.
    """

    def __init__(self, registrar: HostRegistrar | None, on_changed: Callable[[bool], None]) -> None:
        self._registrar = registrar
        self._on_changed = on_changed
        self._regions: list[_Region] = []
        self._has_warned = False

    def find(self, buffer: npt.NDArray[np.uint8], step_id: int) -> torch.Tensor:
        """Returns a region as a tensor, int32, for the copy of a plan.

        Args:
            buffer: the region: one array object for each, and no other region until it is given up.
            step_id: the step whose plan is copied.
        """
        if not self._regions or self._regions[-1].buffer is not buffer:
            self._regions.append(self._open(buffer))
            self._on_changed(self._regions[-1].is_pinned)
        region = self._regions[-1]
        region.last_step = step_id
        return region.items

    def close_before(self, step_id: int) -> None:
        """Gives up older regions that nothing is copied from any more.

        Args:
            step_id: the first step whose copy may still be under way.
        """
        while len(self._regions) > 1 and self._regions[0].last_step < step_id:
            self._unregister(self._regions.pop(0))

    def close(self) -> None:
        """Gives every region up; nothing may be copied from one any more. May be called again."""
        while self._regions:
            self._unregister(self._regions.pop())
        self._on_changed(False)

    def abandon(self) -> None:
        """Leaves every region as it is, for good: something may still be copied from one."""
        _abandoned.extend(self._regions)
        self._regions.clear()
        self._on_changed(False)

    def _open(self, buffer: npt.NDArray[np.uint8]) -> _Region:
        is_pinned = False
        if self._registrar is not None:
            reason = self._registrar.try_register(buffer.ctypes.data, buffer.nbytes)
            is_pinned = reason is None
            if reason is not None and not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "CUDA does not register the ring's memory (%s): copies of plans go through pageable memory, "
                    "which is slower; ringplan_region_pinned is 0",
                    reason,
                )
        items = torch.from_numpy(buffer[: buffer.nbytes // ITEM_BYTES * ITEM_BYTES]).view(torch.int32)
        return _Region(buffer, items, is_pinned)

    def _unregister(self, region: _Region) -> None:
        if region.is_pinned and self._registrar is not None:
            self._registrar.unregister(region.buffer.ctypes.data)


# Memory that a lost copy may still read: kept to the end of the process.
_abandoned: list[_Region] = []

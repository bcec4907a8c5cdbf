"""The FlashInfer package, imported when an engine is to use it and not before."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_service.copy_fence import Event

PACKAGE = "flashinfer"
DISTRIBUTION = "flashinfer-python"


class RecordableEvent(Event, Protocol):
    """An event that can be put on the current stream, again and again. `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Makes it the point that the current stream's work has come to."""


@dataclass(frozen=True, slots=True)
class FlashInferLibrary:
    """What the backend takes from FlashInfer, and from CUDA beside it.

    Args:
        version: FlashInfer's.
        decode_wrapper: `BatchDecodeWithPagedKVCacheWrapper`.
        prefill_wrapper: `BatchPrefillWithPagedKVCacheWrapper`.
        make_event: makes an event of the device's current stream.
    """

    version: str
    decode_wrapper: Callable[..., Any]
    prefill_wrapper: Callable[..., Any]
    make_event: Callable[[], RecordableEvent]


def load_flashinfer() -> FlashInferLibrary:
    """Imports FlashInfer, which takes seconds and needs no GPU.

    Raises:
        ImportError: it is not installed, or a package that it needs is not.
        OSError: a shared library that it needs is not there.
    """
    package = importlib.import_module(PACKAGE)
    return FlashInferLibrary(
        version=package.__version__,
        decode_wrapper=package.BatchDecodeWithPagedKVCacheWrapper,
        prefill_wrapper=package.BatchPrefillWithPagedKVCacheWrapper,
        make_event=torch.cuda.Event,
    )

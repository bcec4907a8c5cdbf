"""Which attention backend an engine runs."""

import logging
from typing import Any, Literal

import torch

from engine_service.attention_backends import flashinfer_library
from engine_service.attention_backends.base import AttentionBackend
from engine_service.attention_backends.flashinfer_backend import FlashInferBackend
from engine_service.attention_backends.flashinfer_library import FlashInferLibrary
from engine_service.attention_backends.flashinfer_support import Capability, find_unsupported
from engine_service.attention_backends.flashinfer_wrapper import ScheduleObserver
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.errors import MissingPackageError, UnsupportedAttentionError
from engine_service.kv_cache import KvShape
from engine_service.model_loading import LoadedModel
from engine_service.warm_up import build_padding_plan

BackendName = Literal["auto", "torch", "flashinfer"]

_logger = logging.getLogger(__name__)


def choose_attention_backend(
    wanted: BackendName,
    loaded: LoadedModel,
    *,
    page_size: int,
    workspace_bytes: int,
    observer: ScheduleObserver | None = None,
    verifies: bool = False,
) -> AttentionBackend[Any]:
    """Makes the attention backend of a model.

    Args:
        wanted: "torch", "flashinfer", or "auto": FlashInfer where the model runs on a GPU and it serves it, else torch.
        loaded: the model.
        page_size: tokens a page holds.
        workspace_bytes: device memory that FlashInfer may take for partial results.
        observer: counts FlashInfer's schedules.
        verifies: whether FlashInfer's schedules are compared with fresh ones where they could be kept.

    Raises:
        MissingPackageError: FlashInfer is wanted, and it is not installed or does not load.
        UnsupportedAttentionError: FlashInfer is wanted and does not serve this model here; it names all that is in the
            way.
    """
    device, shape = loaded.device, loaded.kv_shape
    num_heads = find_num_heads(loaded)
    if _is_flashinfer_taken(wanted, loaded.name, shape, num_heads, find_capability(device)):
        assert num_heads is not None, "FlashInfer serves no model without"
        library = _try_load(is_wanted=wanted == "flashinfer")
        if library is not None:
            _logger.info(
                "attention runs in FlashInfer %s, which compiles its kernels the first time a machine runs them",
                library.version,
            )
            backend = FlashInferBackend(
                library,
                shape,
                num_heads=num_heads,
                page_size=page_size,
                device=device,
                workspace_bytes=workspace_bytes,
                observer=observer,
                verifies=verifies,
            )
            failure = _try_out(backend, shape, num_heads, page_size, device)
            if failure is None:
                return backend
            if wanted == "flashinfer":
                raise UnsupportedAttentionError(loaded.name, wanted, [f"it does not run here ({failure})"])
            _logger.warning("attention runs in torch, which is slower: FlashInfer does not run here (%s)", failure)
    return TorchBackend(shape, page_size=page_size, device=device)


def find_num_heads(loaded: LoadedModel) -> int | None:
    """Returns how many query heads each layer of a model has; None if its configuration does not say."""
    num_heads = getattr(loaded.model.config.get_text_config(), "num_attention_heads", None)
    return num_heads if isinstance(num_heads, int) else None


def find_capability(device: torch.device) -> Capability | None:
    """Returns the compute capability of a GPU; None for a device that is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _is_flashinfer_taken(
    wanted: BackendName, model: str, shape: KvShape, num_heads: int | None, capability: Capability | None
) -> bool:
    if wanted == "torch" or (wanted == "auto" and capability is None):
        return False
    unsupported = find_unsupported(shape, num_heads, capability)
    if not unsupported:
        return True
    if wanted == "flashinfer":
        raise UnsupportedAttentionError(model, wanted, unsupported)
    _logger.warning("attention runs in torch, which is slower: FlashInfer does not serve %s", "; ".join(unsupported))
    return False


@torch.inference_mode()
def _try_out(
    backend: FlashInferBackend, shape: KvShape, num_heads: int, page_size: int, device: torch.device
) -> str | None:
    """Runs a prompt and a decode step, whose kernels are compiled for that; returns why it cannot, or None."""
    size = (1, 2, page_size, shape.num_kv_heads, shape.head_dim)
    try:
        pages = torch.zeros(size, dtype=shape.dtype, device=device)
        for span in (2, 1):
            (arrays,) = build_padding_plan((span,), page_size).labels.values()
            query = torch.zeros((span, num_heads, shape.head_dim), dtype=shape.dtype, device=device)
            backend.attend(pages, query, backend.prepare(arrays), 1.0).cpu()
    except (ImportError, OSError, RuntimeError) as error:
        _logger.debug("FlashInfer does not run here", exc_info=True)
        return f"{error!r:.500}"
    return None


def _try_load(*, is_wanted: bool) -> FlashInferLibrary | None:
    try:
        return flashinfer_library.load_flashinfer()
    except (ImportError, OSError) as error:
        if is_wanted:
            missing = getattr(error, "name", None) or flashinfer_library.PACKAGE
            package = flashinfer_library.DISTRIBUTION if missing == flashinfer_library.PACKAGE else missing
            raise MissingPackageError("attention_backend flashinfer", package, "cuda") from error
        _logger.warning("attention runs in torch, which is slower: FlashInfer does not load (%s)", error)
        return None

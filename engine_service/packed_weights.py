"""Keeps the weights of linear layers in the form that a CPU's matrix kernels take, instead of converting at each call.

torch hands a float32 product to MKL, which rearranges the whole weight every time; for the few rows of a decode step
that costs more than the product. oneDNN, which torch brings too, takes weights that were rearranged once.
"""

import logging
from typing import Any, TypeGuard

import torch
from torch import nn

# What weights are arranged for; the arrangement serves other numbers of rows as well.
_NUM_ROWS = 32
_STEP = 8  # by which numbers of rows rise, at least
# Two orders of adding up float32 numbers differ by less.
_TOLERANCE = 1e-3

_logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed. It computes, and that is all: no gradients, no moving, no saving.

    Args:
        linear: what it takes the place of; float32, on the CPU.

    Attributes:
        weight: the shape and type of the weight, without its values.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        ops: Any = torch.ops.mkldnn
        self._packed: torch.Tensor = ops._reorder_linear_weight(linear.weight.detach(), _NUM_ROWS)
        self._multiply = ops._linear_pointwise.default
        self.bias = linear.bias
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x times the weight's transpose, plus the bias if there is one.

        Args:
            x: float32 [..., in_features].
        """
        num_rows = x.numel() // self.in_features
        num_padding = round_up_rows(num_rows) - num_rows
        if not num_padding:
            product: torch.Tensor = self._multiply(x, self._packed, self.bias, "none", [], "")
            return product
        padded = torch.nn.functional.pad(x.reshape(num_rows, self.in_features), (0, 0, 0, num_padding))
        product = self._multiply(padded, self._packed, self.bias, "none", [], "")
        return product[:num_rows].view(*x.shape[:-1], self.out_features)


def round_up_rows(num_rows: int) -> int:
    """Returns how many rows are multiplied for so many, padding included.

    oneDNN and torch keep a kernel for every number of rows they have met, half a megabyte for each shape of weight: a
    server that meets every length of prompt would keep hundreds of megabytes of them.

    Args:
        num_rows: rows of a product.

    Returns:
        The next power of two up to 8, multiple of 8 up to 128, and beyond one of eight numbers up to each power of two.
    """
    bits = max(num_rows - 1, 0).bit_length()
    if num_rows <= _STEP:
        return min(num_rows, 1) << bits
    step = max(_STEP, 1 << (bits - 4))
    return -(-num_rows // step) * step


@torch.inference_mode()
def pack_weights(model: nn.Module) -> int:
    """Packs the weights of a model's linear layers, where that is possible: float32 on a CPU that oneDNN knows.

    The unpacked weights are given up, those that other layers share apart. The model is good for inference alone
    afterwards.

    Args:
        model: in its final type and place.

    Returns:
        How many layers were packed.
    """
    has_kernels: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # It has no annotations.
    if not has_kernels or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not _is_packable(child):
                continue
            try:
                packed = PackedLinear(child)
                if not num_packed:
                    _check(child, packed)
            except (RuntimeError, NotImplementedError) as error:
                _logger.warning("weights stay as they are: %s", error)
                return num_packed
            setattr(parent, name, packed)
            num_packed += 1
    return num_packed


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass may compute something else.
    return type(module) is nn.Linear and module.weight.dtype is torch.float32 and module.weight.device.type == "cpu"


def _check(linear: nn.Linear, packed: PackedLinear) -> None:
    """Raises RuntimeError if a packed layer computes something else."""
    x = torch.linspace(-1, 1, 3 * linear.in_features).view(1, 3, -1)
    expected = linear(x)
    if not torch.allclose(packed(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())):
        raise RuntimeError("packed weights give other products")

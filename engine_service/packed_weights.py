"""Keeps the weights of linear layers in the form that a CPU's matrix kernels take, instead of converting at each call.

torch hands a float32 product to MKL, which rearranges the whole weight every time; for the few rows of a decode step
that costs more than the product. oneDNN, which torch brings too, takes weights that were rearranged once.
"""

import logging
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import nn

from engine_service.shared_inputs import RunModel, find_shared_inputs

# What weights are arranged for; the arrangement serves other numbers of rows as well.
_NUM_ROWS = 32
_STEP = 8  # by which numbers of rows rise, at least
# Two orders of adding up float32 numbers differ by less.
_TOLERANCE = 1e-3

_logger = logging.getLogger(__name__)


class PackedProduct:
    """The product of an input with the packed weights of one or more layers at once.

    Layers that get the same input are computed together, at the call of the first: threads then meet once instead of
    once a layer. Their products are parts of one tensor.

    Args:
        linears: the layers, float32, on the CPU, of one number of inputs; all have a bias or none has.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        ops: Any = torch.ops.mkldnn
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed: torch.Tensor = ops._reorder_linear_weight(weight, _NUM_ROWS)
        self._multiply = ops._linear_pointwise.default
        first_bias: torch.Tensor | None = linears[0].bias
        self._bias = None if first_bias is None else torch.cat([linear.bias.detach() for linear in linears])
        self._in_features = linears[0].in_features
        self._sizes = [linear.out_features for linear in linears]
        self._x: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._num_left = 0

    def take(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """Returns the product of one layer, and forgets the others' once as many were taken as there are.

        Args:
            x: float32 [..., in_features].
            place: the layer's, among those it was made of.
        """
        if len(self._sizes) == 1:
            return self._compute(x)
        if x is not self._x:
            self._x, self._parts = x, torch.split(self._compute(x), self._sizes, dim=-1)
            self._num_left = len(self._parts)
        part = self._parts[place]
        self._num_left -= 1
        if not self._num_left:
            self._x, self._parts = None, ()
        return part

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // self._in_features
        num_padding = round_up_rows(num_rows) - num_rows
        if not num_padding:
            product: torch.Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
            return product
        padded = torch.nn.functional.pad(x.reshape(num_rows, self._in_features), (0, 0, 0, num_padding))
        product = self._multiply(padded, self._packed, self._bias, "none", [], "")
        return product[:num_rows].view(*x.shape[:-1], product.shape[-1])


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed. It computes, and that is all: no gradients, no moving, no saving.

    Args:
        linear: what it takes the place of.
        product: computes it.
        place: the layer's, among those that `product` computes.

    Attributes:
        weight: the shape and type of the weight, without its values.
    """

    def __init__(self, linear: nn.Linear, product: PackedProduct, place: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._place = product, place
        self.bias = linear.bias
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x times the weight's transpose, plus the bias if there is one.

        Args:
            x: float32 [..., in_features].
        """
        return self._product.take(x, self._place)


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
def pack_weights(model: nn.Module, run: RunModel | None = None) -> int:
    """Packs the weights of a model's linear layers, where that is possible: float32 on a CPU that oneDNN knows.

    The unpacked weights are given up, those that other layers share apart. The model is good for inference alone
    afterwards, in one thread at a time.

    Args:
        model: in its final type and place.
        run: runs it, to find layers that can be computed together; None computes each by itself.

    Returns:
        How many layers were packed.
    """
    has_kernels: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # It has no annotations.
    if not has_kernels or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_packable(child):
                places.setdefault(child, []).append((parent, name))
    num_packed = 0
    for group in _group(places, run):
        try:
            product = PackedProduct(group)
            packed = [PackedLinear(linear, product, place) for place, linear in enumerate(group)]
            if not num_packed:
                _check(group, packed)
        except (RuntimeError, NotImplementedError) as error:
            _logger.warning("weights stay as they are: %s", error)
            return num_packed
        num_packed += len(group)
        while packed:
            # The last reference to an unpacked weight goes before the next one is packed.
            for parent, name in places.pop(group.pop()):
                setattr(parent, name, packed[-1])
            packed.pop()
    return num_packed


def _group(linears: Collection[nn.Linear], run: RunModel | None) -> list[list[nn.Linear]]:
    """Returns the layers, those together that are computed together."""
    groups = [] if run is None or not linears else find_shared_inputs(linears, run)
    grouped = set(chain.from_iterable(groups))
    return groups + [[linear] for linear in linears if linear not in grouped]


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass may compute something else.
    return type(module) is nn.Linear and module.weight.dtype is torch.float32 and module.weight.device.type == "cpu"


def _check(linears: Sequence[nn.Linear], packed: Sequence[PackedLinear]) -> None:
    """Raises RuntimeError if packed layers compute something else."""
    x = torch.linspace(-1, 1, 3 * linears[0].in_features).view(1, 3, -1)
    for linear, layer in zip(linears, packed, strict=True):
        expected = linear(x)
        if not torch.allclose(layer(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())):
            raise RuntimeError("packed weights give other products")

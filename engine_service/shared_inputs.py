"""Finds linear layers that are given the very same input one after another, as query, key and value layers are.

What a model does with a layer's input and product cannot be read from its layers, so the model is run and watched.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

# Kernels may round otherwise where elements are not side by side.
_TOLERANCE = 1e-4

# Runs a model on a few tokens, always the same; returns what comes out.
RunModel = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    layer: nn.Linear
    x: torch.Tensor
    content: torch.Tensor  # what x held then


@torch.inference_mode()
def find_shared_inputs(layers: Iterable[nn.Linear], run: RunModel) -> list[list[nn.Linear]]:
    """Returns groups of two or more layers that can be computed as one, each as soon as its first layer is called.

    The layers of a group are called in a row and with one tensor, which nothing changes in between; all have a bias or
    none has. A layer that is called more than once a run is in no group. Products of a group are parts of a larger
    tensor, so there are no groups if the model does not take such products, or computes something else from them.

    Args:
        layers: the layers to look at.
        run: runs the model that they are part of.
    """
    calls: list[_Call] = []

    def watch(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        x = inputs[0] if inputs else torch.empty(0)
        calls.append(_Call(layer, x, x.clone()))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(watch).remove)
        expected = run()
    num_calls = Counter(call.layer for call in calls)
    groups = []
    for _, found in groupby(calls, key=lambda call: (id(call.x), call.layer.bias is None)):
        first, *others = found
        is_same = all(torch.equal(first.content, call.content) for call in others)
        group = [call.layer for call in (first, *others)]
        if others and is_same and all(num_calls[layer] == 1 for layer in group):
            groups.append(group)
    return groups if _takes_parts(groups, run, expected) else []


def _takes_parts(groups: list[list[nn.Linear]], run: RunModel, expected: torch.Tensor) -> bool:
    """Whether the model computes the same where products are parts of larger tensors."""

    def spread(_layer: nn.Module, _inputs: object, product: torch.Tensor) -> torch.Tensor:
        others = torch.full_like(product, torch.nan)
        return torch.cat((product, others), dim=-1)[..., : product.shape[-1]]

    with ExitStack() as hooks:
        for layer in (layer for group in groups for layer in group):
            hooks.callback(layer.register_forward_hook(spread).remove)
        try:
            tolerance = _TOLERANCE * float(expected.abs().max())
            return torch.allclose(run(), expected, rtol=_TOLERANCE, atol=tolerance)
        except RuntimeError:
            return False

"""Layers are computed together only where they get one tensor in a row and the model takes parts of larger products."""

from collections.abc import Callable

import torch
from torch import nn

from engine_service.shared_inputs import find_shared_inputs

Forward = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Three layers of one shape, and what a test does with them."""

    def __init__(self, forward: Forward, *, biases: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=bias) for bias in biases)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Does it."""
        return self._forward(self, x)

    def find(self) -> list[str]:
        """Returns the groups by the names of their layers."""
        names = {layer: name for name, layer in self.named_children() if isinstance(layer, nn.Linear)}
        groups = find_shared_inputs(names, lambda: self(torch.arange(12.0).view(1, 2, 6)))
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in names)
        return ["".join(names[layer] for layer in group) for group in groups]


def test_layers_that_get_one_tensor_in_a_row_are_a_group() -> None:
    """Query, key and value are one; a layer that gets their result is not in it."""
    assert Layers(lambda self, x: self.a(x) + self.b(x) + self.c(x)).find() == ["abc"]
    assert Layers(lambda self, x: self.c(self.a(x) * self.b(x))).find() == ["ab"]
    assert Layers(lambda self, x: self.c(self.b(self.a(x)))).find() == []


def test_a_layer_between_parts_a_group() -> None:
    """Products are kept until all of a group are taken, so its calls must follow each other."""

    def forward(self: Layers, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(2 * x) + self.c(x)

    assert Layers(forward).find() == []


def test_an_equal_tensor_is_another_one() -> None:
    """What is computed ahead is found by the tensor itself."""
    assert Layers(lambda self, x: self.a(x) + self.b(x.clone())).find() == []


def test_a_tensor_that_is_changed_in_between_is_another_one() -> None:
    """Its name is the same, what it holds is not."""

    def forward(self: Layers, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        x.add_(1)
        return first + self.b(x) + self.c(x)

    assert Layers(forward).find() == []


def test_a_layer_that_is_called_twice_is_in_no_group() -> None:
    """It would take a product that is another layer's turn."""
    assert Layers(lambda self, x: self.a(x) + self.b(x) + self.a(self.c(x))).find() == []


def test_layers_with_and_without_a_bias_are_apart() -> None:
    """Theirs would be two products."""

    def forward(self: Layers, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.c(x)

    assert Layers(forward, biases=(True, True, False)).find() == ["ab"]


def test_a_model_that_takes_no_parts_of_products_has_no_groups() -> None:
    """Code that needs a product's elements one after another fails on parts of a larger one, or reads others."""
    assert Layers(lambda self, x: (self.a(x) + self.b(x)).view(12) + self.c(x).view(12)).find() == []

    def forward(self: Layers, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).as_strided((2, 6), (6, 1)) + self.b(x)

    assert Layers(forward).find() == []

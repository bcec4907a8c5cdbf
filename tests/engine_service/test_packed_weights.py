"""Packed weights compute what the layers computed before."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from engine_service.packed_weights import PackedLinear, PackedProduct, pack_weights, round_up_rows


def _build_layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "plain": nn.Linear(24, 40, bias=False),
            "inner": nn.Sequential(nn.Linear(24, 7), nn.ReLU()),
            "short": nn.Linear(24, 8).to(torch.bfloat16),
            "norm": nn.LayerNorm(24),
        }
    ).eval()


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 33, 24), (5, 24), (2, 3, 24), (1, 0, 24), (1, 1000, 24)])
def test_packed_layers_give_the_same_products(shape: tuple[int, ...]) -> None:
    """With and without a bias, for one row and for many, up to rounding."""
    layers = _build_layers()
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = [layers[name](x) for name in ("plain", "inner")]
        assert pack_weights(layers) == 2
        products = [layers[name](x) for name in ("plain", "inner")]
    for product, reference in zip(products, expected, strict=True):
        torch.testing.assert_close(product, reference, rtol=1e-5, atol=1e-5)


def test_few_numbers_of_rows_are_multiplied() -> None:
    """A kernel is kept for each: prompts of every length take few of them, and are padded by an eighth at most."""
    rounded = [round_up_rows(num_rows) for num_rows in range(1, 4097)]
    assert len(set(rounded)) <= 60
    assert rounded == sorted(rounded)
    for num_rows, num_multiplied in enumerate(rounded, start=1):
        assert num_rows <= num_multiplied <= max(num_rows * 9 / 8, num_rows + 7)
    assert [round_up_rows(num_rows) for num_rows in (0, 1, 2, 4, 8, 16, 32, 64)] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_a_layer_multiplies_as_many_rows_as_are_rounded_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shape of what it is given."""
    product = PackedProduct([nn.Linear(24, 40)])
    multiply, multiplied = product._multiply, []
    monkeypatch.setattr(product, "_multiply", lambda x, *rest: multiplied.append(x.shape) or multiply(x, *rest))
    with torch.inference_mode():
        assert product.take(torch.zeros(1, 33, 24), 0).shape == (1, 33, 40)
        assert product.take(torch.zeros(1, 32, 24), 0).shape == (1, 32, 40)
    assert multiplied == [(40, 24), (1, 32, 24)]


class _Attention(nn.Module):
    """Three layers with one input, of which one is called only when it is asked for, and one with their sum."""

    def __init__(self, *, has_biases: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(24, size, bias=has_biases) for size in (16, 8, 8))
        self.output = nn.Linear(16, 24)
        self.calls_key = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        key = self.key(x) if self.calls_key else x.new_zeros((*x.shape[:-1], 8))
        both: torch.Tensor = self.output(query + torch.cat((key, self.value(x)), dim=-1))
        return both


@pytest.mark.parametrize("has_biases", [False, True])
def test_layers_with_one_input_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch, *, has_biases: bool) -> None:
    """Three layers take one product, and give what they gave, for whatever input comes next."""
    model = _Attention(has_biases=has_biases).eval()
    inputs = [torch.randn(1, num_rows, 24) for num_rows in (1, 2, 33, 1)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        assert pack_weights(model, lambda: model(torch.ones(1, 2, 24))) == 4
        compute, computed = PackedProduct._compute, []
        monkeypatch.setattr(PackedProduct, "_compute", lambda self, x: computed.append(len(x)) or compute(self, x))
        for x, reference in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), reference, rtol=1e-5, atol=1e-5)
    assert len(computed) == 2 * len(inputs)


def test_a_layer_that_is_left_out_leaves_nothing_for_the_next_input() -> None:
    """What was computed for it is not taken for another tensor, and goes with the next whole group."""
    model = _Attention(has_biases=True).eval()
    inputs = [torch.randn(1, 1, 24) for _ in range(4)]
    with torch.inference_mode():
        model.calls_key = False
        expected = [model(x) for x in inputs]
        model.calls_key = True
        assert pack_weights(model, lambda: model(torch.ones(1, 2, 24))) == 4
        model.calls_key = False
        for x, reference in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), reference, rtol=1e-5, atol=1e-5)
        model.calls_key = True
        model(inputs[0])
    layer: Any = model.query
    assert layer._product._x is None
    assert layer._product._parts == ()


def test_a_layer_that_stands_in_two_places_is_packed_in_both() -> None:
    """Both are the same packed layer."""
    layers = _build_layers()
    layers["again"] = nn.Sequential(layers["plain"])
    assert pack_weights(layers) == 2
    assert layers["again"][0] is layers["plain"]
    assert isinstance(layers["plain"], PackedLinear)


def test_only_plain_float32_layers_are_packed() -> None:
    """Other types keep their weights, and so does a subclass, which may compute something else."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    layers = _build_layers()
    layers["scaled"] = Scaled(24, 8)
    assert pack_weights(layers) == 2
    assert isinstance(layers["plain"], PackedLinear)
    assert isinstance(layers["short"], nn.Linear)
    assert isinstance(layers["scaled"], Scaled)


def test_packed_layer_tells_the_shape_and_type_of_its_weight() -> None:
    """Model code that asks for them still gets them; the unpacked values are gone."""
    layers = _build_layers()
    pack_weights(layers)
    weight: Any = layers["plain"].weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((40, 24), torch.float32, "meta")


def test_weight_that_another_layer_shares_stays_there() -> None:
    """Embeddings that are tied to the last layer still work."""
    model = nn.ModuleDict({"embedding": nn.Embedding(40, 24), "head": nn.Linear(24, 40, bias=False)})
    model["head"].weight = model["embedding"].weight
    expected = model["embedding"](torch.tensor([3])).detach().clone()
    pack_weights(model)
    torch.testing.assert_close(model["embedding"](torch.tensor([3])), expected, rtol=0, atol=0)


def test_kernels_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first packed layer is compared with the layer it replaces; a difference leaves all as they are."""
    layers = _build_layers()
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros((*x.shape[:-1], self.out_features)))
    with caplog.at_level(logging.WARNING):
        assert pack_weights(layers) == 0
    assert isinstance(layers["plain"], nn.Linear)
    assert "weights stay as they are: packed weights give other products" in caplog.text

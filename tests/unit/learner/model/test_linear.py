"""N rows, I inputs, O outputs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from learner.learner import Learner
from learner.model import linear, products
from learner.model.linear import OneDnnLinear, WideLinear, multiply_fast, replace_layers
from learner.model.products import product
from tests.unit.learner.trajectories import make_config, make_group

ROUNDING = 2**-8
"""Largest relative error of rounding to bfloat16, which has 8 bits."""


def replaced(layer: nn.Linear, kind: type[nn.Linear] = WideLinear) -> nn.Linear:
    layer = copy.deepcopy(layer)
    replace_layers(layer, kind)
    return layer


@pytest.mark.parametrize(
    ("kind", "dtype", "rounding"), [(WideLinear, torch.bfloat16, 1.001 * ROUNDING), (OneDnnLinear, torch.float32, 1e-5)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_exact_up_to_one_rounding(
    bias: bool, kind: type[nn.Linear], dtype: torch.dtype, rounding: float
):
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=bias).to(dtype)
    layer, exact = replaced(plain, kind), copy.deepcopy(plain).double()
    x, pull = torch.randn(2, 5, 96).to(dtype), torch.randn(2, 5, 64).to(dtype)
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    found, wanted = layer(inputs[0]), exact(inputs[1])
    found.backward(pull)
    wanted.backward(pull.double())
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(found, wanted), (inputs[0].grad, inputs[1].grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
    assert len(pairs) == (4 if bias else 3)
    for a, b in pairs:
        assert a is not None and b is not None and a.dtype == dtype
        # Sums in float32 are off by far less than the rounding, but may fall on its other side.
        assert_close(a.double(), b, rtol=rounding, atol=1e-5)


def test_it_is_the_same_as_a_product_of_bfloat16_but_for_the_order_of_the_sum():
    torch.manual_seed(0)
    plain = nn.Linear(96, 64).bfloat16()
    x = torch.randn(50, 96).bfloat16()
    assert_close(replaced(plain)(x), plain(x), rtol=2 * ROUNDING, atol=1e-5)


def test_what_is_kept_for_backward_is_bfloat16():
    kept: list[Tensor] = []
    layer = replaced(nn.Linear(8, 4).bfloat16())

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(torch.randn(3, 8).bfloat16().requires_grad_())
    assert [(tuple(x.shape), x.dtype) for x in kept] == [((3, 8), torch.bfloat16), ((4, 8), torch.bfloat16)]


def test_only_what_needs_a_gradient_gets_one():
    layer = replaced(nn.Linear(8, 4).bfloat16())
    layer.weight.requires_grad_(False)
    x = torch.randn(8).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None and x.grad.shape == (8,)


@pytest.mark.parametrize(("kind", "dtype"), [(WideLinear, torch.float32), (OneDnnLinear, torch.bfloat16)])
def test_another_type_is_multiplied_as_it_is(kind: type[nn.Linear], dtype: torch.dtype):
    layer = nn.Linear(8, 4).to(dtype)
    found = replaced(layer, kind)(x := torch.randn(3, 8).to(dtype))
    assert torch.equal(found, layer(x)) and "Product" not in type(found.grad_fn).__name__


@pytest.mark.parametrize(
    ("left", "copied"),
    [
        (torch.randn(96, 70), 0),
        (torch.randn(70, 96).t(), 40 * 70),
        (torch.randn(70, 30).t(), 30 * 70),
        (torch.randn(96, 140)[:, :70], 96 * 70),
        (torch.randn(1, 1).expand(96, 70), 96 * 70),
    ],
    ids=["as it is", "transposed, larger", "transposed, smaller", "a slice", "expanded"],
)
def test_a_product_by_onednn_is_exact_up_to_the_order_of_the_sum_and_copies_only_the_smaller_transposed_factor(
    monkeypatch: pytest.MonkeyPatch, left: torch.Tensor, copied: int
):
    first: list[torch.Tensor] = []
    by_onednn = products.linear_by_onednn
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)  # any processor has its operator
    monkeypatch.setattr(products, "linear_by_onednn", lambda x, weight: first.append(x) or by_onednn(x, weight))
    torch.manual_seed(0)
    for right in (torch.randn(40, 70).t(), torch.randn(70, 40)):
        first.clear()
        assert_close(product(left, right).double(), left.double() @ right.double(), rtol=1e-5, atol=1e-4)
    assert sum(each.numel() for each in first if not each.is_contiguous()) == copied and len(first) == 1


def test_a_product_by_onednn_over_nothing_is_zero(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    assert torch.equal(product(torch.randn(0, 3).t(), torch.randn(0, 2)), torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("is_half_slow", "is_onednn_faster", "kind"),
    [(True, False, WideLinear), (False, True, OneDnnLinear), (False, False, nn.Linear)],
)
def test_layers_change_where_torchs_own_are_slower(monkeypatch, is_half_slow, is_onednn_faster, kind):
    monkeypatch.setattr(linear, "multiplies_in_float32", lambda: is_half_slow)
    monkeypatch.setattr(linear, "is_onednn_faster", lambda: is_onednn_faster)
    module = nn.Sequential(nn.Linear(8, 4))
    multiply_fast(module)
    assert type(module[0]) is kind


def test_a_layer_keeps_its_names_and_a_kind_of_its_own_is_left_alone():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 4), Own(4, 2))
    names = list(module.state_dict())
    replace_layers(module, WideLinear)
    assert [type(part) for part in module] == [WideLinear, Own] and list(module.state_dict()) == names


@pytest.mark.parametrize("sections", [{}, {"learner": {"lora": {"rank": 2}}}], ids=["whole", "adapters"])
@pytest.mark.parametrize(("kind", "dtype"), [(WideLinear, "bfloat16"), (OneDnnLinear, "float32")])
def test_a_learner_computes_the_same_either_way(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, kind, dtype: str, sections: dict[str, dict[str, object]]
):
    logprobs, norms, kinds = [], [], []
    for is_slow in (True, False):
        monkeypatch.setattr(linear, "multiplies_in_float32", lambda x=is_slow and kind is WideLinear: x)
        for module in (linear, products):
            monkeypatch.setattr(module, "is_onednn_faster", lambda x=is_slow and kind is OneDnnLinear: x)
        learner = Learner(make_config(model_path, dtype=dtype, **sections))
        kinds.append({type(part) for part in learner.networks.modules() if isinstance(part, nn.Linear)})
        metrics = learner.update(make_group(0)).metrics
        logprobs.append(metrics["mismatch/mean_abs_nats"])
        norms.append(metrics["learner/gradient_norm"])
    assert kinds == [{kind}, {nn.Linear}]
    assert logprobs[0] == pytest.approx(logprobs[1], rel=0.01) and norms[0] == pytest.approx(norms[1], rel=0.02)

"""N rows, I inputs, O outputs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from learner.learner import Learner
from learner.model import linear
from learner.model.linear import Float32Linear, multiply_in_float32
from tests.unit.learner.trajectories import make_config, make_group

ROUNDING = 2**-8
"""Largest relative error of rounding to bfloat16, which has 8 bits."""


def widened(layer: nn.Linear) -> nn.Linear:
    layer = copy.deepcopy(layer)
    multiply_in_float32(layer)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_exact_up_to_one_rounding(bias: bool):
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=bias).bfloat16()
    layer, exact = widened(plain), copy.deepcopy(plain).double()
    x, pull = torch.randn(2, 5, 96).bfloat16(), torch.randn(2, 5, 64).bfloat16()
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    found, wanted = layer(inputs[0]), exact(inputs[1])
    found.backward(pull)
    wanted.backward(pull.double())
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(found, wanted), (inputs[0].grad, inputs[1].grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
    assert len(pairs) == (4 if bias else 3)
    for a, b in pairs:
        assert a is not None and b is not None and a.dtype == torch.bfloat16
        # Sums in float32 are off by far less than the rounding, but may fall on its other side.
        assert_close(a.double(), b, rtol=1.001 * ROUNDING, atol=1e-5)


def test_it_is_the_same_as_a_product_of_bfloat16_but_for_the_order_of_the_sum():
    torch.manual_seed(0)
    plain = nn.Linear(96, 64).bfloat16()
    x = torch.randn(50, 96).bfloat16()
    assert_close(widened(plain)(x), plain(x), rtol=2 * ROUNDING, atol=1e-5)


def test_what_is_kept_for_backward_is_bfloat16():
    kept: list[Tensor] = []
    layer = widened(nn.Linear(8, 4).bfloat16())

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(torch.randn(3, 8).bfloat16().requires_grad_())
    assert [(tuple(x.shape), x.dtype) for x in kept] == [((3, 8), torch.bfloat16), ((4, 8), torch.bfloat16)]


def test_only_what_needs_a_gradient_gets_one():
    layer = widened(nn.Linear(8, 4).bfloat16())
    layer.weight.requires_grad_(False)
    x = torch.randn(8).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None and x.grad.shape == (8,)


def test_another_type_is_multiplied_as_it_is():
    layer = nn.Linear(8, 4)
    x = torch.randn(3, 8)
    assert torch.equal(widened(layer)(x), layer(x))


def test_a_layer_keeps_its_names_and_a_kind_of_its_own_is_left_alone():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 4), Own(4, 2))
    names = list(module.state_dict())
    multiply_in_float32(module)
    assert [type(part) for part in module] == [Float32Linear, Own] and list(module.state_dict()) == names


@pytest.mark.parametrize("sections", [{}, {"learner": {"lora": {"rank": 2}}}], ids=["whole", "adapters"])
def test_a_learner_computes_the_same_either_way(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, dict[str, object]]
):
    logprobs, norms, kinds = [], [], []
    for in_float32 in (True, False):
        monkeypatch.setattr(linear, "multiplies_in_float32", lambda x=in_float32: x)
        learner = Learner(make_config(model_path, dtype="bfloat16", **sections))
        kinds.append({type(part) for part in learner.networks.modules() if isinstance(part, nn.Linear)})
        metrics = learner.update(make_group(0)).metrics
        logprobs.append(metrics["mismatch/mean_abs_nats"])
        norms.append(metrics["learner/gradient_norm"])
    assert kinds == [{Float32Linear}, {nn.Linear}]
    assert logprobs[0] == pytest.approx(logprobs[1], rel=0.01) and norms[0] == pytest.approx(norms[1], rel=0.02)

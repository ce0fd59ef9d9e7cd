import pytest
import torch
from torch import nn
from torch.testing import assert_close

from cluster.contracts.config import OptimizerConfig
from cluster.contracts.errors import CheckpointError
from learner.optimizer import Optimizer, learning_rate_at


def test_the_learning_rate_warms_up_and_decays_to_its_share():
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, min_learning_rate_share=0.5)
    rates = [learning_rate_at(step, config=config, num_steps=7) for step in range(8)]
    assert_close(rates, [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5])


def test_cosine_decays_by_a_quarter_in_the_first_third():
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", min_learning_rate_share=0.0)
    assert_close([learning_rate_at(step, config=config, num_steps=4) for step in range(4)], [1.0, 0.75, 0.25, 0.0])


def test_a_schedule_that_begins_later_is_the_same_one_moved():
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, min_learning_rate_share=0.5)
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in ("late", "early.w")}
    optimizer = Optimizer(parameters.items(), config=config, num_steps=7, learning_rates={"early.": 10.0}, first_step=2)
    parameters["early.w"].grad = torch.ones(1)
    rates = [optimizer.step(step, gradient_norms={}) for step in range(2)]
    assert_close(parameters["early.w"].detach(), torch.tensor([-15.0]))
    parameters["late"].grad = torch.ones(1)
    rates += [optimizer.step(step, gradient_norms={}) for step in range(2, 7)]
    assert_close(rates, [0.0, 0.0, 0.5, 1.0, 1.0, 0.75, 0.5])
    assert_close(parameters["late"].detach(), torch.tensor([-3.75]))


def test_the_first_adam_step_moves_by_the_learning_rate():
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = Optimizer([("w", weight)], config=OptimizerConfig(learning_rate=0.1), num_steps=1)
    weight.grad = torch.tensor([3.0, 4.0])
    norms = optimizer.gradient_norms()
    assert norms == {"policy": 5.0}
    assert optimizer.step(0, gradient_norms=norms) == 0.1
    assert_close(weight.detach(), torch.tensor([0.9, -1.1]))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.mlp.up_proj.weight", (1, 1), 0.95),
        ("norm.linear.weight", (1, 1), 0.95),
        ("layers.0.input_layernorm.weight", (1,), 1.0),
        ("layers.0.self_attn.q_norm.weight", (1, 1), 1.0),  # of each head, as Cohere's and Chameleon's
        ("layers.0.mlp.experts.down_proj_bias", (1, 1), 1.0),  # of each expert, as gpt-oss has them
    ],
)
def test_weights_decay_and_norms_and_biases_do_not(name: str, shape: tuple[int, ...], expected: float):
    parameter = nn.Parameter(torch.ones(shape))
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = Optimizer([(name, parameter)], config=config, num_steps=1)
    parameter.grad = torch.zeros(shape)
    optimizer.step(0, gradient_norms={})
    assert float(parameter.detach()) == pytest.approx(expected)


def test_clipping_scales_the_gradient_to_the_limit():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("w", weight)], config=OptimizerConfig(max_grad_norm=1.0), num_steps=1)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step(0, gradient_norms=optimizer.gradient_norms())
    assert_close(weight.grad, torch.tensor([0.6, 0.8]))


def test_a_gradient_within_the_limit_stays_as_it_is():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("w", weight)], config=OptimizerConfig(max_grad_norm=1.0), num_steps=1)
    weight.grad = torch.tensor([0.3, 0.4])
    optimizer.step(0, gradient_norms=optimizer.gradient_norms())
    assert weight.grad.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_the_second_adam_step_has_the_configured_decays_and_epsilon():
    """Gradients 1 and 3: m = 0.5 · 0.5 + 0.5 · 3 over 1 − 0.25, v = 0.75 · 0.25 + 0.25 · 9 over 1 − 0.5625."""
    weight = nn.Parameter(torch.zeros(1))
    config = OptimizerConfig(learning_rate=1.0, betas=(0.5, 0.75), epsilon=0.5, weight_decay=0.0, max_grad_norm=None)
    optimizer = Optimizer([("w", weight)], config=config, num_steps=2)
    for step, gradient in enumerate((1.0, 3.0)):
        weight.grad = torch.tensor([gradient])
        optimizer.step(step, gradient_norms={})
    moved = 1 / 1.5 + (1.75 / 0.75) / ((2.4375 / 0.4375) ** 0.5 + 0.5)
    assert_close(weight.detach(), torch.tensor([-moved]))


def test_learning_rates_change_where_the_kl_is_beyond_twice_or_below_half_of_its_target_and_stay_within_bounds():
    config = OptimizerConfig(learning_rate=1.0, target_kl=0.1)
    optimizer = Optimizer([("w", nn.Parameter(torch.zeros(1)))], config=config, num_steps=100)
    rates = []
    for kl in (0.19, 0.051, 0.21, 0.049, 0.049, *[9.0] * 20, *[0.0] * 40):
        optimizer.observe_kl(kl)
        rates.append(optimizer.step(0, gradient_norms={}))
    assert rates[:5] == pytest.approx([1.0, 1.0, 1 / 1.5, 1.0, 1.5])
    assert (min(rates), rates[-1]) == pytest.approx((0.01, 100.0))


@pytest.mark.parametrize(("has_own_critic", "clipped"), [(True, [0.6, 0.8, 1.0]), (False, [3 / 13, 4 / 13, 12 / 13])])
def test_a_critic_is_clipped_by_itself_where_it_is_a_model_of_its_own(has_own_critic: bool, clipped: list[float]):
    policy, critic = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    named = [("policy.w", policy), ("critic.w", critic)]
    optimizer = Optimizer(named, config=OptimizerConfig(), num_steps=1, has_own_critic=has_own_critic)
    policy.grad, critic.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    norms = optimizer.gradient_norms()
    assert norms == ({"policy": 5.0, "critic": 12.0} if has_own_critic else {"policy": 13.0})
    optimizer.step(0, gradient_norms=norms)
    assert_close(torch.cat([policy.grad, critic.grad]), torch.tensor(clipped))


def test_bfloat16_gradients_are_summed_in_float32_and_small_steps_are_not_lost():
    weight = nn.Parameter(torch.ones(1, 1))
    config = OptimizerConfig(learning_rate=1e-4, max_grad_norm=None)
    optimizer = Optimizer([("w", weight)], config=config, num_steps=100, compute_dtype=torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    for gradient in (256.0, 1.0):
        (weight * gradient).sum().backward()
    assert float(optimizer.masters()["w"].grad) == 257.0  # bfloat16 cannot tell 257 from 256
    for step in range(40):
        optimizer.masters()["w"].grad = torch.ones(1, 1)
        optimizer.step(step, gradient_norms={})
    assert_close(optimizer.masters()["w"].detach(), torch.full((1, 1), 0.996), atol=1e-5, rtol=0)
    assert float(weight.detach()) == float(torch.tensor(0.996).bfloat16())


def test_foreign_state_is_refused_by_name():
    optimizer = Optimizer([("w", nn.Parameter(torch.zeros(2)))], config=OptimizerConfig(), num_steps=1)
    with pytest.raises(CheckpointError, match="'v'"):
        optimizer.load_state({"exp_avg/v": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"\[3\], not \[2\]"):
        optimizer.load_state({"exp_avg/w": torch.zeros(3)})


def test_a_parameter_that_never_had_a_gradient_has_no_state_and_comes_back_without():
    """A vision tower that no text goes through."""

    def made() -> tuple[dict[str, nn.Parameter], Optimizer]:
        parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("policy.used", "policy.unused")}
        return parameters, Optimizer(parameters.items(), config=OptimizerConfig(), num_steps=2)

    parameters, optimizer = made()
    parameters["policy.used"].grad = torch.ones(2)
    optimizer.step(0, gradient_norms=optimizer.gradient_norms())
    _, resumed = made()
    resumed.load_state(optimizer.state())
    assert set(resumed.state()) == {f"{kind}/policy.used" for kind in ("step", "exp_avg", "exp_avg_sq")}
    resumed.load_state({})
    assert resumed.state() == {}

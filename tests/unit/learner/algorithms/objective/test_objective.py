"""The composition: what it needs, what it refuses, what it reports."""

import dataclasses
import json
import math
import typing
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import Plugin, find, names, parameters, type_hints
from learner.algorithms.conditions import InertWith
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.statistics import Statistics, reported_names
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import PRESETS, expand
from tests.unit.learner.algorithms import options
from tests.unit.learner.algorithms.batches import Case, case


def make(**fields) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(expand(fields)))


def own_advantage(rewards_G: Tensor, *, scale: float) -> Tensor:
    return scale * rewards_G


def own_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor, lags_BT: Tensor) -> Tensor:
    return -policy_logprobs_BT * advantages_BT / (1 + lags_BT)


def pull_to_reference(policy_logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor) -> Tensor:
    return (policy_logprobs_BT - reference_logprobs_BT).square()


def test_the_default_is_grpo_and_needs_nothing_more():
    made = make()
    assert made.needs == frozenset()
    assert made.formula()["text"] == "token_mean[ppo_clip(A = grpo)]"


def test_the_objective_in_one_line_has_the_load_balance_of_experts():
    """Seen in review: it is minimised, and the line that says what is minimised left it out."""
    made = make(router_aux_loss_coefficient=0.001)
    assert made.formula()["text"] == "token_mean[ppo_clip(A = grpo)] + 0.001·E·Σₑ fₑ·Pₑ"


def test_needs_follow_from_the_parts():
    assert make(kl={"loss": {"coefficient": 0.1}}).needs == {"reference_logprobs"}
    assert make(monitor={"reference_kl": 10}).needs == {"reference_logprobs"}
    assert make(entropy_coefficient=0.01).needs == {"entropies"}
    assert make(preset="ppo").needs == {"reference_logprobs", "values"}
    assert make(proximal="recompute").needs == frozenset()
    assert make(proximal="recompute", corrections=["tis"]).needs == frozenset()
    in_reward = {"reward": {"coefficient": 0.1}}
    assert make(proximal="recompute", kl=in_reward).needs == {"proximal_logprobs", "reference_logprobs"}
    assert make(policy_loss=f"{__name__}:pull_to_reference").needs == {"reference_logprobs"}
    assert make(filters=["high_entropy_tokens"]).needs == {"proximal_logprobs", "entropies"}
    assert make(policy_loss="clip_cov").needs == frozenset()
    assert make(policy_loss="clip_cov", proximal="recompute").needs == {"proximal_logprobs"}


def test_the_policy_that_begins_the_step_is_looked_up_where_several_updates_follow():
    of_several = Objective.from_config(AlgorithmConfig(proximal="recompute"), updates_per_step=2)
    assert of_several.needs == {"proximal_logprobs"}
    assert Objective.from_config(AlgorithmConfig(), updates_per_step=2).needs == frozenset()


def test_the_averaged_policy_is_looked_up_in_every_step_and_the_one_that_begins_it_only_for_what_is_fixed_before():
    assert make(preset="grpo_ewma").needs == {"averaged_logprobs"}
    assert make(proximal="ewma", policy_loss="clip_cov").needs == {"averaged_logprobs"}
    filtered = make(proximal="ewma", filters=["high_entropy_tokens"])
    assert filtered.needs == {"averaged_logprobs", "proximal_logprobs", "entropies"}
    with pytest.raises(DataError, match="the batch of policy version 2 has no proximal_logprobs"):
        make(proximal="ewma").prepare(_without_old())


def test_a_kl_in_the_reward_is_of_the_policy_that_acted_and_not_of_an_average():
    kl = {"reward": {"coefficient": 0.5}}
    made, acted = make(proximal="ewma", kl=kl), make(kl=kl).prepare(_without_old())
    assert torch.equal(made.prepare(case(0).batch).advantages_NT, acted.advantages_NT)
    assert made.formula()["text"] == "token_mean[ppo_clip(A = grpo)], r_t − 0.5·k1(μ, π_ref)"
    assert made.formula()["proximal"]["decay"] == 0.889


@pytest.mark.parametrize("proximal", ["rollout", "approximate"])
def test_a_kl_in_the_reward_is_of_the_policy_that_sampled_whatever_else_looks_at_the_one_that_begins_the_step(proximal):
    kl = {"reward": {"coefficient": 0.5}}
    made, acted = make(proximal=proximal, kl=kl, filters=["high_entropy_tokens"]), make(kl=kl).prepare(_without_old())
    assert "proximal_logprobs" in made.needs
    assert torch.equal(made.prepare(case(0).batch).advantages_NT, acted.advantages_NT)
    named = {"rollout": "π_old", "approximate": "μ"}[proximal]  # the passport's π_old of `rollout` is μ
    assert made.formula()["text"].endswith(f"r_t − 0.5·k1({named}, π_ref)")


def test_where_nothing_looked_at_the_policy_that_begins_the_step_it_is_the_present_one_without_gradient():
    """The ratio is 1, and its gradient that of the policy gradient."""
    whole, made = case(0), make(proximal="recompute", policy_loss="importance_sampling")
    prepared = made.prepare(_without_old())
    policy = whole.policy.clone().requires_grad_()
    result = made.loss(prepared, policy_logprobs_BT=policy)
    result.loss.backward()
    assert_close(policy.grad, -prepared.advantages_NT * prepared.weights_NT)
    assert prepared.advantages_NT.abs().max() > 0.1
    report = result.statistics.compute()
    assert report["ratio_min"] == report["ratio_max"] == 1.0


def test_covariances_are_of_the_policy_that_pi_old_stands_for():
    def ranked(batch: BatchTensors, **fields) -> Tensor | None:
        return make(policy_loss="kl_cov", **fields).prepare(batch).covariances_NT

    sampled, begins = ranked(_without_old()), ranked(case(0).batch, proximal="recompute")
    assert not torch.equal(sampled, begins)
    assert torch.equal(ranked(case(0).batch, filters=["high_entropy_tokens"]), sampled)
    assert torch.equal(ranked(case(0).batch, proximal="approximate"), begins)
    assert torch.equal(ranked(case(0).batch, proximal="ewma"), sampled)


def _without_old() -> BatchTensors:
    return dataclasses.replace(case(0).batch, proximal_logprobs_NT=None)


def test_users_functions_are_named_by_full_path():
    module = own_advantage.__module__
    made = make(advantage={"name": f"{module}:own_advantage", "scale": 2.0}, policy_loss=f"{module}:own_loss")
    whole = case(0)
    prepared = made.prepare(whole.batch)
    mask = whole.batch.loss_mask_NT
    torch.testing.assert_close(prepared.advantages_NT, 2 * whole.batch.rewards_N[:, None] * mask)
    assert torch.isfinite(whole.loss(made)[0])
    assert made.formula()["advantage"]["parameters"] == {"scale": 2.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": "gae"}, r"advantage='gae' needs values, but no critic is configured; add a `value:` section"),
        ({"aggregation": "none"}, r"aggregation='none' is not there; .*has: prompt_mean, .*token_mean"),
        ({"corrections": ["tis"]}, r"corrections\[0\]='tis' weighs π_old.*set proximal to 'recompute'"),
        (
            {"corrections": ["self_normalised_tis"], "proximal": "approximate"},
            r"corrections\[0\]='self_normalised_tis' weighs π_old over the whole step.*set proximal to 'recompute'",
        ),
        (
            {"advantage": "cumulative_returns", "kl": {"reward": {"coefficient": 0.1, "credit": "to_go"}}},
            r"kl.reward.credit='to_go' with advantage='cumulative_returns'.*leave kl.reward.credit out",
        ),
        ({"advantage": "over_groups"}, r"advantage='over_groups' is not there; .*has: cpgd, cumulative_returns"),
        ({"corrections": ["approximate_proximal"]}, r"corrections\[0\]='approximate_proximal' is not there"),
        (
            {"corrections": ["learner.algorithms.objective.proximal:approximate_proximal"]},
            r"its first parameter is rollout_logprobs_BT, and must be one of .*proximal_logprobs_BT",
        ),
        ({"policy_loss": "gspoo"}, r"did you mean 'gspo'\?.* clip_cov, .*gmpo, .*vespo"),
        ({"advantage": "ga"}, r"did you mean 'gae'\?.* gae, .*opo"),
        (
            {"advantage": {"name": "grpo", "epsilonn": 1}},
            r"advantage.epsilonn=1 is not a parameter of 'grpo'; it takes: epsilon",
        ),
        ({"advantage": {"name": "grpo", "singleton": "some"}}, r"advantage.singleton='some' is not valid"),
        (
            {"advantage_shaping": [{"name": "reward_clip", "low": 0, "high": 1}]},
            r"advantage_shaping\[0\]='reward_clip' is not there; .*has: advantage_clip, column_weights, group_weights, over_length, whiten",
        ),
        (
            {"advantage": {"name": "grpo", "epsilon": -1e-6}},
            r"advantage.epsilon=-1e-06 is not valid: .* 0; it must be a number",
        ),
        ({"preset": "grppo"}, r"algorithm.preset='grppo' is unknown; choose one of grpo"),
        ({"preset": ["grpo"]}, r"algorithm.preset=\['grpo'\] is unknown; choose one of grpo"),
        (
            {"preset": "gspo", "policy_loss": "ppo_clip"},
            r"preset='gspo' with policy_loss='ppo_clip': the ratio of the whole",
        ),
        ({"preset": "dr_grpo", "advantage": {"name": "grpo"}}, r"preset='dr_grpo' with advantage='grpo'"),
        ({"preset": "ppo", "value": None}, r"preset='ppo' with value=None: PPO needs its critic"),
        ({"preset": "ppo", "advantage": "grpo"}, r"preset='ppo' with advantage='grpo': GAE over a critic"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        (
            {"coefficient": 0.1, "place": "reward"},
            r"coefficient, place: a KL is one of the terms loss, reward and rollout",
        ),
        (
            {"loss": {"coefficient": 0.1, "estimator": "k1"}},
            r"'k1' has an expected gradient of 0 .*use 'unbiased' here",
        ),
        ({"rollout": {"coefficient": 0.1, "estimator": "k1"}}, r"'k1' has an expected gradient of 0 .*'drift'"),
        ({"reward": {"coefficient": 0.1, "estimator": "unbiased"}}, r"the current ratio, which a reward .*use 'k1'"),
        ({"loss": {"adaptive": {}}}, r"loss.coefficient\n.*Field required"),
    ],
)
def test_a_kl_that_cannot_act_is_refused(kl, message):
    with pytest.raises(ValidationError, match=message):
        make(preset="grpo" if "place" in kl else None, kl=kl)


def spoiled(field: str, row: int, value: float):
    batch = case(1).batch
    tensor = getattr(batch, field).clone()
    if tensor.dim() == 2:
        tensor[row, batch.loss_mask_NT[row].nonzero()[0]] = value
    else:
        tensor[row] = value
    return dataclasses.replace(batch, **{field: tensor})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rewards_N", math.nan, r"trajectory t4 of group g1: reward \(nan\) is not finite"),
        ("rewards_N", math.inf, r"trajectory t4 of group g1: reward \(inf\) is not finite"),
        ("completion_lengths_N", 0, r"trajectory t4 of group g1: completion_lengths is zero"),
        (
            "rollout_logprobs_NT",
            math.nan,
            r"trajectory t4 of group g1: rollout_logprobs is not finite at an unmasked token",
        ),
        ("reference_logprobs_NT", -math.inf, r"trajectory t4 of group g1: reference_logprobs is not finite"),
        ("values_NT", math.inf, r"trajectory t4 of group g1: values is not finite"),
    ],
)
def test_bad_data_name_trajectory_group_and_field(field, value, message):
    with pytest.raises(DataError, match=message):
        make().prepare(spoiled(field, 4, value))


def test_a_row_with_nothing_unmasked_is_refused():
    batch = case(1).batch
    mask = batch.loss_mask_NT.clone()
    mask[4] = False
    with pytest.raises(DataError, match="trajectory t4 of group g1: loss_mask is false for every token"):
        make().prepare(dataclasses.replace(batch, loss_mask_NT=mask))


def test_mismatched_lengths_are_refused():
    batch = case(1).batch
    with pytest.raises(DataError, match=r"rollout_logprobs_NT has shape \[9, 5\], but the loss mask makes it \[9, 6\]"):
        make().prepare(dataclasses.replace(batch, rollout_logprobs_NT=batch.rollout_logprobs_NT[:, :5]))


def test_rloo_of_a_group_of_one_names_the_group():
    batch = dataclasses.replace(case(1).batch, group_index_N=torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3]))
    with pytest.raises(
        DataError, match=r"group g2 \(trajectory t8\): rewards: rloo needs at least 2 trajectories in a group, got 1"
    ):
        make(advantage="rloo").prepare(batch)


def test_what_an_algorithm_needs_must_be_in_the_batch():
    batch = dataclasses.replace(case(1).batch, reference_logprobs_NT=None)
    with pytest.raises(DataError, match="policy version 2 has no reference_logprobs"):
        make(kl={"loss": {"coefficient": 0.1}}).prepare(batch)


def test_a_truncation_penalty_that_would_raise_rewards_is_refused_as_the_configuration_is_read():
    with pytest.raises(
        ConfigError, match=r"reward_shaping\[0\].coefficient=1.5 .* less than or equal to 1; it must be a number"
    ):
        make(reward_shaping=[{"name": "truncation_penalty", "coefficient": 1.5}])


@pytest.mark.parametrize(
    ("field", "variant", "message"),
    [
        ("policy_loss", {"name": "ppo_clip", "log_ratio_clamp": 0}, "log_ratio_clamp=0 .* greater than 0; .* or null"),
        ("policy_loss", {"name": "ppo_clip", "epsilon_low": -0.2}, "epsilon_low=-0.2 .* greater than or equal to 0"),
        ("policy_loss", {"name": "ppo_clip", "dual_clip": 1}, "dual_clip=1 .* greater than 1"),
        ("policy_loss", {"name": "gspo", "delta": 0}, "delta=0 .* greater than or equal to 1"),
        ("policy_loss", {"name": "vespo", "log_ratio_clamp": -1}, "log_ratio_clamp=-1 .* greater than 0"),
        ("policy_loss", {"name": "dppo", "ratio_cap": 0}, "ratio_cap=0 .* greater than 0"),
        ("policy_loss", {"name": "sapo", "tau_positive": 0}, "tau_positive=0 .* greater than 0"),
        ("policy_loss", {"name": "clip_cov", "cov_low": 6}, "cov_low=6.* is not below cov_high=5.0"),
        ("policy_loss", {"name": "cispo", "epsilon_min": 5}, "epsilon_min=5.* is not below epsilon_max=5.0"),
        ("advantage", {"name": "gae", "lambda_": 95}, "lambda_=95 .* less than or equal to 1"),
        ("advantage", {"name": "grpo", "ddof": 2}, "ddof=2 .* less than or equal to 1"),
        ("value.loss", {"name": "value_clip", "clip_range": -0.2}, "clip_range=-0.2 .* greater than 0; .* or null"),
        ("filters", {"name": "high_entropy_tokens", "share": 20}, "share=20 .* less than or equal to 1"),
        ("filters", {"name": "return_bounds", "low": 1, "high": 0}, "low=1.* is not below high=0"),
        ("corrections", {"name": "tis", "cap": 0}, "cap=0 .* greater than 0"),
        ("corrections", {"name": "tis", "floor": 3}, "floor=3.* is not below cap=2.0"),
        ("corrections", {"name": "rejection", "low": 1, "high": 0.5}, "low=1.* is not below high=0.5"),
        (
            "reward_shaping",
            {"name": "overlong_penalty", "max_length": 64, "cache": 65},
            r"reward_shaping.*\.cache=65 is more than max_length=64; give a lower cache, or a higher max_length",
        ),
        ("reward_shaping", {"name": "reward_clip", "low": 1, "high": -1}, "low=1.* is not below high=-1"),
        ("reward_shaping", {"name": "reward_scale", "factor": 0}, "factor=0 is not valid: .* 0 leaves nothing"),
        ("advantage_shaping", {"name": "advantage_clip", "low": 1, "high": 1}, "low=1.* is not below high=1"),
    ],
)
def test_a_parameter_that_can_only_be_a_mistake_is_refused_as_the_configuration_is_read(field, variant, message):
    section = options.with_set({"advantage": "gae", "value": {}, "proximal": "recompute"}, field, variant)
    with pytest.raises(ConfigError, match=message):
        Objective.from_config(AlgorithmConfig.model_validate(section), updates_per_step=2)


FREE = {
    *("policy_loss.clip_cov.cov_high", "corrections.rejection.high", "filters.return_bounds.high"),
    *("reward_shaping.reward_clip.high", "advantage_shaping.advantage_clip.high"),
    "reward_shaping.reward_scale.offset",
    *("reward_shaping.reward_over_length.power", "advantage_shaping.over_length.power"),
    *("selection.balanced.low", "selection.balanced.high"),
}
"""Numbers that may be any, or have their bound at another parameter."""


def test_a_number_that_a_variant_takes_says_its_bounds():
    def is_plain(hint: Any) -> bool:
        return hint in (int, float) or any(each in (int, float) for each in typing.get_args(hint)[:2])

    found = {
        f"{field}.{variant['name']}.{name}"
        for field, home in HOMES.items()
        for variant in options.variants(field)
        for function in [find(Plugin(name=variant["name"]), home=home, field=field)]
        for name, hint in type_hints(function, include_extras=True).items()
        if name in parameters(function, home=home) and is_plain(hint) and not _bounds(hint)
    }
    assert found == FREE


def _bounds(hint: Any) -> bool:
    return any(not isinstance(each, InertWith) for each in getattr(hint, "__metadata__", ()))


def test_a_monitored_reference_may_be_missing_from_what_was_recorded_without_it():
    """A resumed run learns such steps again, and a replay all of them."""
    batch = dataclasses.replace(case(1).batch, reference_logprobs_NT=None)
    monitored, plain = (make(monitor={"reference_kl": every}).prepare(batch) for every in (1, None))
    assert monitored.batch.reference_logprobs_NT is None
    assert torch.equal(monitored.advantages_NT, plain.advantages_NT)


def test_the_kl_to_the_reference_is_that_of_the_trajectories_that_it_scored():
    whole = case(1)
    some_NT = whole.batch.reference_logprobs_NT.clone()
    some_NT[1:] = torch.nan
    batch = dataclasses.replace(whole.batch, reference_logprobs_NT=some_NT)
    loss, found, gradient = Case(batch, whole.policy, whole.entropies, whole.values).loss(
        make(monitor={"reference_kl": 3})
    )
    plain_loss, _, plain_gradient = whole.loss(make())
    assert torch.equal(loss, plain_loss) and torch.equal(gradient, plain_gradient)
    mask_T = whole.batch.loss_mask_NT[0]
    expected = (whole.policy[0] - some_NT[0])[mask_T]
    assert found["kl_reference_k1_mean"] == pytest.approx(expected.mean().item())
    assert found["kl_reference_per_trajectory_mean"] == pytest.approx(expected.sum().item())
    assert found["reference_logprob_mean"] == pytest.approx(some_NT[0][mask_T].mean().item())
    with pytest.raises(
        DataError, match="trajectory t1 of group g0: reference_logprobs is not finite at an unmasked token, or missing"
    ):
        make(kl={"loss": {"coefficient": 0.1}}).prepare(batch)


def test_the_reference_is_wanted_in_the_first_step_and_in_every_so_many_after_it():
    wanted = [make(monitor={"reference_kl": 3}).wants_reference(step) for step in range(7)]
    assert wanted == [True, False, False, True, False, False, True]
    assert not make().wants_reference(0) and make(kl={"loss": {"coefficient": 0.1}}).wants_reference(1)
    with pytest.raises(ConfigError, match=r"monitor\.reference_kl=3 changes nothing: .*leave it out"):
        make(monitor={"reference_kl": 3}, kl={"loss": {"coefficient": 0.1}})


def test_a_filtered_trajectory_leaves_the_denominator_and_a_filtered_token_does_not():
    whole = case(2)
    truncated = whole.batch.truncated_N.clone()
    truncated[0] = True
    batch = dataclasses.replace(whole.batch, truncated_N=truncated)
    prepared = make(filters=["overlong_mask"]).prepare(batch)
    assert prepared.weights_NT[0].sum() == 0
    assert prepared.weights_NT.sum().item() == pytest.approx(1.0)
    chosen = make(filters=[{"name": "high_entropy_tokens", "share": 0.5}]).prepare(whole.batch)
    assert chosen.gradient_mask_NT.sum() < whole.batch.loss_mask_NT.sum()
    assert (chosen.weights_NT > 0).sum() == whole.batch.loss_mask_NT.sum()


def test_self_normalised_weights_have_a_mean_of_1_over_the_trajectories_that_train():
    whole = case(2)
    truncated = whole.batch.truncated_N.clone()
    truncated[0] = True
    batch = dataclasses.replace(
        whole.batch, truncated_N=truncated, proximal_logprobs_NT=whole.batch.rollout_logprobs_NT * 0.9
    )
    chosen = {"proximal": "recompute", "corrections": ["self_normalised_tis"], "filters": ["overlong_mask"]}
    prepared = make(**chosen).prepare(batch)
    assert prepared.correction_weights_NT[prepared.loss_mask_NT].mean().item() == pytest.approx(1.0)
    assert prepared.correction_weights_NT[0].sum() == 0


def test_a_step_of_which_nothing_is_left_trains_nothing():
    whole = case(2)
    batch = dataclasses.replace(whole.batch, rewards_N=torch.ones_like(whole.batch.rewards_N))
    made = make(filters=["zero_variance"])
    prepared = made.prepare(batch)
    result = made.loss(prepared, policy_logprobs_BT=whole.policy.requires_grad_())
    assert result.loss.item() == 0 and not made.trains(prepared, result.statistics)
    assert not make(filters=["zero_variance"], entropy_coefficient=0.1).trains(prepared, result.statistics)
    assert made.statistics(prepared).compute()["groups_without_variance"] == 3


def test_kl_in_the_reward_lowers_the_reward_of_a_trajectory():
    whole = case(3)
    made = make(advantage="raw_reward", kl={"reward": {"coefficient": 0.5, "estimator": "k1"}})
    batch = dataclasses.replace(whole.batch, proximal_logprobs_NT=None)
    gap = (batch.rollout_logprobs_NT - batch.reference_logprobs_NT) * batch.loss_mask_NT
    want = (batch.rewards_N - 0.5 * gap.sum(1))[:, None] * batch.loss_mask_NT
    torch.testing.assert_close(made.prepare(batch).advantages_NT, want)


def penalised(credit: str) -> Tensor:
    """Advantages of four tokens, of which the second is the environment's, with log-ratios of 1, 2, 4 and 8 nats to the reference."""
    whole = case(3, num_groups=1, group_size=1, width=4)
    mask, rollout_NT = torch.tensor([[True, False, True, True]]), torch.zeros(1, 4, dtype=torch.float64)
    gaps_NT = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    batch = dataclasses.replace(
        whole.batch, loss_mask_NT=mask, rollout_logprobs_NT=rollout_NT, reference_logprobs_NT=rollout_NT - gaps_NT,
        rewards_N=torch.tensor([3.0], dtype=torch.float64), proximal_logprobs_NT=None,
    )  # fmt: skip
    kl = {"reward": {"coefficient": 0.5, "credit": credit}}
    return make(advantage="raw_reward", kl=kl).prepare(batch).advantages_NT


def test_the_kl_in_the_reward_is_credited_to_trajectory_tokens_to_go_or_token():
    expected = {
        "trajectory": [3 - 6.5, 0.0, 3 - 6.5, 3 - 6.5],  # half of 1 + 4 + 8
        "to_go": [3 - 6.5, 0.0, 3 - 6.0, 3 - 4.0],
        "token": [3 - 0.5, 0.0, 3 - 2.0, 3 - 4.0],
    }
    assert {credit: penalised(credit)[0].tolist() for credit in expected} == expected


def test_a_kl_after_the_group_baseline_is_not_taken_off_by_it():
    """Two equal trajectories: the baseline takes away a penalty of the reward that both have, and none that comes after it."""
    batch = of_one_token()
    before, after = ({"reward": {"coefficient": 0.5, "credit": credit}} for credit in ("trajectory", "to_go"))
    assert make(advantage="rloo", kl=before).prepare(batch).advantages_NT.tolist() == [[0.0], [0.0]]
    assert make(advantage="rloo", kl=after).prepare(batch).advantages_NT.tolist() == [[-0.5], [-0.5]]


def test_both_kls_act_at_once_each_with_its_own_coefficient():
    made, prepared = one_token(
        advantage="raw_reward", kl={"loss": {"coefficient": 0.1, "estimator": "k3"}, "reward": {"coefficient": 0.5}}
    )
    assert prepared.advantages_NT.tolist() == [[0.5], [0.5]]  # a reward of 1, less half a nat
    report = made.loss(prepared, policy_logprobs_BT=torch.full((2, 1), -1.0)).statistics.compute()
    assert report["kl_loss"] == pytest.approx(0.1 * math.exp(-1))  # k3 at one nat: exp(-1) + 1 - 1


def test_turns_with_rewards_of_their_own_are_used_where_time_matters():
    whole = case(4)
    token_rewards = torch.zeros_like(whole.batch.rollout_logprobs_NT)
    token_rewards[0, 1] = 2.0
    batch = dataclasses.replace(
        whole.batch, token_rewards_NT=token_rewards, loss_mask_NT=torch.ones_like(whole.batch.loss_mask_NT)
    )
    prepared = make(advantage="cumulative_returns").prepare(batch)
    assert prepared.advantages_NT[0].tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]


def with_token_rewards(batch: BatchTensors, mask: list[bool], rewards: list[float]) -> BatchTensors:
    """Of the first trajectory; the others stay as they are, and earn nothing on the way."""
    loss_mask, token_rewards = batch.loss_mask_NT.clone(), torch.zeros_like(batch.rollout_logprobs_NT)
    loss_mask[0], token_rewards[0] = torch.tensor(mask), torch.tensor(rewards)
    return dataclasses.replace(batch, loss_mask_NT=loss_mask, token_rewards_NT=token_rewards)


def test_a_reward_on_an_answer_of_the_environment_goes_to_the_action_before_it():
    mask = [True, True, False, False, True, False]
    batch = with_token_rewards(case(4).batch, mask, [0.0, 1.0, 2.0, 4.0, 0.0, 8.0])
    prepared = make(advantage="cumulative_returns").prepare(batch)
    assert prepared.advantages_NT[0].tolist() == [15.0, 15.0, 0.0, 0.0, 8.0, 0.0]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("last_token", [1.0, 0.0, 0.0, 5.0, 0.0, 0.0]), ("every_token", [4.0, 3.0, 3.0, 5.0, 0.0, 0.0])],
)
def test_what_shaping_adds_to_a_reward_lands_beside_the_rewards_of_tokens(placement: str, expected: list[float]):
    """A reward of 3 becomes 6."""
    batch = with_token_rewards(case(4).batch, [True] * 4 + [False] * 2, [1.0, 0.0, 0.0, 2.0, 0.0, 0.0])
    batch = dataclasses.replace(batch, rewards_N=torch.full((9,), 3.0).double())
    doubled = [{"name": "reward_scale", "factor": 2.0}]
    made = make(advantage="token_rewards", reward_shaping=doubled, reward_placement=placement)
    assert made.prepare(batch).advantages_NT[0].tolist() == expected


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (1.0, "trajectory t0 of group g0: token_rewards stand before the first token that trains"),
        (math.nan, "trajectory t0 of group g0: token_rewards are not all finite"),
    ],
)
def test_a_reward_that_no_action_can_have_earned_is_refused(reward, message):
    batch = with_token_rewards(case(4).batch, [False, True, True, True, True, True], [reward, 0.0, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(DataError, match=message):
        make(advantage="cumulative_returns").prepare(batch)


def test_the_adaptive_coefficient_is_checkpointed():
    adaptive = {
        "loss": {"coefficient": 0.1, "adaptive": {"target": 1.0, "horizon": 10}},
        "reward": {"coefficient": 0.5},
    }
    made = make(kl=adaptive)
    made.observe({"kl_reference_per_trajectory_mean": 5.0, "trajectories": 10.0})
    assert made.kl_coefficients == {"loss": pytest.approx(0.12), "reward": 0.5}
    again = make(kl=adaptive)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.kl_coefficients == made.kl_coefficients
    prepared = made.prepare(case(6).batch)
    assert prepared.kl_coefficients["loss"] == pytest.approx(0.12)


def test_the_coefficient_in_force_weighs_the_kl_in_the_loss_and_in_the_reward():
    term = {"coefficient": 0.1, "adaptive": {"target": 1.0, "horizon": 10}}
    made, whole = make(advantage="raw_reward", kl={"loss": term, "reward": term}), case(6)

    def penalties() -> tuple[float, Tensor]:
        prepared = made.prepare(whole.batch)
        report = made.loss(prepared, policy_logprobs_BT=whole.policy).statistics.compute()
        return report["kl_loss"], whole.batch.rewards_N - prepared.batch.token_rewards_NT.sum(1)

    in_loss, in_reward = penalties()
    made.observe({"kl_reference_per_trajectory_mean": 5.0, "trajectories": 10.0})
    assert penalties()[0] == pytest.approx(1.2 * in_loss) != 0
    assert_close(penalties()[1], 1.2 * in_reward)


def test_corrections_multiply_each_other():
    """π_old/μ = 3, held at 2 by the first and let through by the second: 6 times the loss of 1 per token."""
    whole = case(0)
    corrections = [{"name": "tis", "cap": 2.0}, "decoupled"]
    made = make(advantage="raw_reward", policy_loss="reinforce", proximal="recompute", corrections=corrections)
    batch = dataclasses.replace(
        whole.batch,
        rewards_N=torch.ones(9).double(),
        proximal_logprobs_NT=whole.batch.rollout_logprobs_NT + math.log(3.0),
    )
    ones = torch.ones_like(whole.policy)
    report = made.loss(made.prepare(batch), policy_logprobs_BT=-ones).statistics.compute()
    assert (report["correction_weight_mean"], report["policy_loss"]) == (pytest.approx(6.0), pytest.approx(6.0))


def test_a_critic_has_a_coefficient_and_an_aggregation_of_its_own():
    """Values of 0, returns of 2 for one token and 1 for three: means of ½R² of 2 and ½, and 0.4 of their mean, 5/4. By tokens it is 7/8."""
    whole = case(0).rows([0, 1])
    batch = dataclasses.replace(
        whole.batch,
        loss_mask_NT=torch.tensor([[True, False, False], [True, True, True]]),
        rewards_N=torch.tensor([2.0, 1.0]).double(),
        values_NT=torch.zeros(2, 3).double(),
        completion_lengths_N=torch.tensor([1, 3]),
        **{name: getattr(whole.batch, name)[:, :3] for name in ("rollout_logprobs_NT", "policy_versions_NT")},
        **dict.fromkeys(("reference_logprobs_NT", "reference_partition_NTP", "proximal_logprobs_NT", "entropies_NT")),
    )
    value = {
        "backbone": "shared",
        "coefficient": 0.4,
        "aggregation": "sequence_mean",
        "loss": {"name": "value_clip", "clip_range": None},
    }
    made = make(advantage="cumulative_returns", value=value)
    policy = batch.rollout_logprobs_NT
    result = made.loss(made.prepare(batch), policy_logprobs_BT=policy, values_BT=batch.values_NT)
    assert result.statistics.compute()["value_loss"] == pytest.approx(0.5)


def test_statistics_survive_an_exchange_between_ranks_and_are_all_documented():
    whole, made = case(7), make(preset="ppo", entropy_coefficient=0.01, proximal="recompute", corrections=["tis"])
    prepared = made.prepare(whole.batch)
    of_the_policy = whole.of_rows(made, prepared, whole.policy, list(range(9))).statistics
    statistics = Statistics.merge([made.statistics(prepared), of_the_policy])
    report = statistics.compute()
    assert report.keys() <= reported_names().keys()
    assert report["trajectories"] == 9 and report["groups"] == 3
    assert report["tokens"] == int(whole.batch.loss_mask_NT.sum())


def test_explained_variance_is_one_for_a_perfect_critic():
    whole, made = case(8), make(preset="ppo", kl={"reward": None}, advantage_shaping=[])
    returns = make(advantage="cumulative_returns").prepare(whole.batch).advantages_NT
    perfect = dataclasses.replace(whole.batch, values_NT=returns)
    prepared = made.prepare(perfect)
    report = made.statistics(prepared).compute()
    assert report["explained_variance"] == pytest.approx(1.0)


def test_a_perfect_critic_of_normalised_returns_has_advantages_of_zero():
    whole = case(8)
    made = make(preset="ppo", kl={"reward": None}, advantage_shaping=[], value={"normalise_returns": True})
    returns = make(advantage="cumulative_returns").prepare(whole.batch).advantages_NT + 10 * whole.batch.loss_mask_NT
    # Rewards that are 10 higher; the critic begins with values in the rewards' units.
    batch = dataclasses.replace(whole.batch, rewards_N=whole.batch.rewards_N + 10, values_NT=returns)
    for _ in range(3):
        prepared = made.prepare(batch)
        assert prepared.advantages_NT.abs().max() < 1e-12
        assert_close(prepared.returns_NT, returns)
        factor, shift = made.adopt(prepared)
        batch = dataclasses.replace(batch, values_NT=batch.values_NT * factor + shift)
        report, loss = _of_values(made, prepared, whole, batch.values_NT)
        assert loss == pytest.approx(0.0, abs=1e-12) and report["explained_variance"] == pytest.approx(1.0)
    # What the head gives now has a mean of 0 and a standard deviation of 1.
    given_M = batch.values_NT[batch.loss_mask_NT]
    assert_close(torch.stack([given_M.mean(), given_M.std()]), torch.tensor([0.0, 1.0]).double(), atol=0.03, rtol=0)


def test_the_value_loss_is_of_normalised_returns_whatever_their_scale():
    whole, losses = case(8), []
    for scale in (1.0, 1000.0):
        made = make(preset="ppo", kl={"reward": None}, value={"normalise_returns": True})
        batch = dataclasses.replace(whole.batch, rewards_N=whole.batch.rewards_N * scale, values_NT=0 * whole.values)
        prepared = made.prepare(batch)
        factor, shift = made.adopt(prepared)
        report, loss = _of_values(made, prepared, whole, batch.values_NT * factor + shift)
        assert report["value_mean"] == pytest.approx(0.0, abs=1e-9)
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1])


def _of_values(made: Objective, prepared: Prepared, whole: Case, values: Tensor) -> tuple[dict[str, float], float]:
    of_rows = made.loss(prepared, policy_logprobs_BT=whole.policy, values_BT=values).statistics
    report = Statistics.merge([made.statistics(prepared), of_rows]).compute()
    return report, report["value_loss"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_and_writes_its_passport(preset):
    made = make(preset=preset)
    loss, report, gradient = case(9).loss(made)
    assert torch.isfinite(loss) and gradient.abs().sum() > 0
    passport = json.loads(json.dumps(made.formula()))
    assert passport["advantage"]["formula"] and passport["policy_loss"]["formula"]
    assert report["loss"] == pytest.approx(loss.item())


def test_a_preset_takes_overrides():
    made = make(preset="dapo", policy_loss={"epsilon_high": 0.3}, kl={"loss": {"coefficient": 0.01}})
    parameters = made.formula()["policy_loss"]["parameters"]
    assert (parameters["epsilon_low"], parameters["epsilon_high"]) == (0.2, 0.3)
    assert make(preset="ppo", value={"coefficient": 0.5}).config.value.loss.params == {"clip_range": 0.2}
    assert make(preset="grpo", policy_loss="cispo").config.policy_loss.name == "cispo"


def of_one_token() -> BatchTensors:
    """Two trajectories of one token each, with equal rewards."""
    return BatchTensors(
        loss_mask_NT=torch.ones(2, 1, dtype=torch.bool),
        rollout_logprobs_NT=torch.full((2, 1), -1.0),
        policy_versions_NT=torch.zeros(2, 1, dtype=torch.int64),
        rewards_N=torch.ones(2),
        group_index_N=torch.zeros(2, dtype=torch.int64),
        reference_logprobs_NT=torch.full((2, 1), -2.0),
        truncated_N=torch.zeros(2, dtype=torch.bool),
        completion_lengths_N=torch.ones(2, dtype=torch.int64),
        trajectory_ids=["a", "b"],
        group_ids=["g", "g"],
        prompt_ids=["p", "p"],
        current_version=0,
    )


def one_token(**fields):
    """Their advantage is 0, so what is left is the term in question."""
    made = make(**fields)
    return made, made.prepare(of_one_token())


def test_the_entropy_bonus_lowers_the_loss():
    made, prepared = one_token(entropy_coefficient=0.1)
    entropies = torch.tensor([[2.0], [4.0]], requires_grad=True)
    result = made.loss(
        prepared.rows([0, 1]), policy_logprobs_BT=torch.full((2, 1), -1.0, requires_grad=True), entropies_BT=entropies
    )
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-0.3)  # -0.1 * (2 + 4) / 2
    torch.testing.assert_close(entropies.grad, torch.full((2, 1), -0.05))


def test_the_policy_drift_of_cpgd_is_the_kl_from_the_rollout_policy():
    made, prepared = one_token(preset="cpgd", kl={"rollout": {"coefficient": 0.5}})
    policy = torch.full((2, 1), -1.0 + math.log(2.0), requires_grad=True)  # π = 2μ
    result = made.loss(prepared.rows([0, 1]), policy_logprobs_BT=policy)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(0.5 * (2 - math.log(2.0) - 1))
    torch.testing.assert_close(policy.grad, torch.full((2, 1), 0.5 * (2 - 1) / 2))  # β·(π/μ − 1), a mean of two
    assert made.formula()["text"] == "token_mean[cpgd(A = cpgd) + 0.5·drift(π, μ)]"


@pytest.mark.parametrize("loss", names(HOMES["policy_loss"]))
def test_a_token_without_an_advantage_counts_as_clipped_under_no_loss(loss):
    """Its ratio is e**3 or e**-3, out of every bound."""
    made, prepared = one_token(policy_loss=loss)  # equal rewards
    policy = torch.tensor([[2.0], [-4.0]])
    report = made.loss(prepared, policy_logprobs_BT=policy).statistics.compute()
    assert prepared.advantages_NT.tolist() == [[0.0], [0.0]]
    assert {value for name, value in report.items() if name.startswith("clip_fraction")} <= {0.0}


def test_the_gspo_preset_does_not_clip_what_the_engine_rounds():
    made = make(preset="gspo")
    whole = case(9)
    whole = Case(
        dataclasses.replace(whole.batch, proximal_logprobs_NT=None), whole.policy, whole.entropies, whole.values
    )
    _, report, _ = whole.loss(made)
    assert report["kl_rollout_k1_max"] > 0.1 and report["clip_fraction"] == 0
    assert whole.loss(make(preset="gspo", proximal="rollout"))[1]["clip_fraction"] > 0


def test_the_kl_penalty_pulls_towards_the_reference():
    made, prepared = one_token(kl={"loss": {"coefficient": 0.5, "estimator": "k3"}})
    policy = torch.full((2, 1), -1.0, requires_grad=True)
    result = made.loss(prepared.rows([0, 1]), policy_logprobs_BT=policy)
    result.loss.backward()
    # k3 at log(ref/policy) = -1: exp(-1) + 1 - 1 = 0.3679; its derivative by log policy: 1 - exp(-1) = 0.6321
    assert float(result.loss.detach()) == pytest.approx(0.5 * 0.367879, rel=1e-5)
    torch.testing.assert_close(policy.grad, torch.full((2, 1), 0.5 * 0.632121 / 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("current_version", "newest"), [(2, 0), (5, 3)])
def test_the_mismatch_is_measured_on_the_newest_tokens_there_are(current_version, newest):
    whole = case(0)
    batch = dataclasses.replace(whole.batch, current_version=current_version)
    aged = Case(batch, whole.policy, whole.entropies, whole.values)
    _, report, _ = aged.loss(make(), parts=[[0, 1], [2, 3, 4, 5, 6, 7, 8]])
    is_newest = batch.loss_mask_NT & (batch.policy_versions_NT == 2)
    expected = (whole.policy - batch.rollout_logprobs_NT).abs()[is_newest]
    assert report["mismatch_off_policy_steps_min"] == newest
    assert report["mismatch_mean"] == pytest.approx(float(expected.mean()))
    assert report["mismatch_max"] == pytest.approx(float(expected.max()))


def test_a_mini_batch_has_weights_of_its_own_and_the_advantages_of_the_step():
    whole = case(0)
    made = make(aggregation="token_mean", filters=["zero_variance"])
    prepared = made.prepare(whole.batch)
    rows = [0, 1, 2, 6]
    taken = made.mini_batch(prepared, rows, begins_step=False)
    num_tokens = int(whole.batch.loss_mask_NT[rows].sum())
    torch.testing.assert_close(taken.weights_NT, whole.batch.loss_mask_NT[rows] / num_tokens, check_dtype=False)
    torch.testing.assert_close(taken.advantages_NT, prepared.advantages_NT[rows])


def test_the_whole_step_as_one_mini_batch_is_what_was_prepared():
    whole = case(3)
    made = make(preset="ppo", policy_loss="clip_cov", kl={"reward": None})
    prepared = made.prepare(whole.batch)
    taken = made.mini_batch(prepared, list(range(9)), begins_step=True)
    assert taken.batch is prepared.batch
    for field in dataclasses.fields(prepared):
        if field.name != "batch":
            torch.testing.assert_close(getattr(taken, field.name), getattr(prepared, field.name), rtol=0, atol=0)


def test_covariances_are_ranked_within_the_mini_batch():
    whole = case(4)
    made = make(policy_loss="kl_cov")
    prepared = made.prepare(whole.batch)
    taken = made.mini_batch(prepared, [3, 4, 5], begins_step=True)
    mask, logprobs = whole.batch.loss_mask_NT[3:6], whole.batch.rollout_logprobs_NT[3:6]
    advantages = prepared.advantages_NT[3:6]
    want = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
    torch.testing.assert_close(taken.batch_covariances_M, want[mask])


def test_the_mismatch_is_that_of_the_policy_that_begins_the_step():
    whole, made = case(0), make()
    prepared = made.prepare(whole.batch)
    later = whole.of_rows(made, made.mini_batch(prepared, list(range(9)), begins_step=False), whole.policy, [0, 1])
    assert "mismatch_mean" not in later.statistics.compute()


@pytest.mark.parametrize("is_of_the_kl", [False, True])
def test_the_mismatch_is_that_of_all_mini_batches_where_a_pass_saw_them_before_the_first_update(is_of_the_kl):
    """The newest tokens are in the second mini-batch."""
    whole, rows = case(0), [0, 1, 2]
    versions_NT = whole.batch.policy_versions_NT.clone()
    versions_NT[rows] = 0
    first_NT = whole.batch.rollout_logprobs_NT + torch.arange(9)[:, None] / 8
    start = {"starting_logprobs_NT" if is_of_the_kl else "proximal_logprobs_NT": first_NT}
    batch = dataclasses.replace(whole.batch, policy_versions_NT=versions_NT, **start)
    config = AlgorithmConfig(proximal="rollout" if is_of_the_kl else "recompute")
    made = Objective.from_config(config, updates_per_step=2)
    prepared = made.prepare(batch)
    update = made.mini_batch(prepared, rows, begins_step=True)
    seen = made.loss(update, policy_logprobs_BT=whole.policy[rows]).statistics
    report = Statistics.merge([made.statistics(prepared), seen]).compute()
    is_newest = batch.loss_mask_NT & (versions_NT == 2)
    gaps = (is_newest * torch.arange(9)[:, None] / 8)[is_newest]
    assert report["mismatch_mean"] == pytest.approx(float(gaps.mean()))
    assert (report["mismatch_max"], report["mismatch_off_policy_steps_min"]) == (pytest.approx(float(gaps.max())), 0)

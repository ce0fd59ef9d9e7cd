"""What the importers make of a peer's settings, against the peer's own numbers: loss, gradient and advantages, through a run's objective.

The recorded cases say under which settings the peer computed; these go through the importer as if they stood in a file.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError
from deploy.importing import PEERS
from deploy.importing.table import imported
from learner.algorithms.objective import Objective
from learner.algorithms.registry.resolving import resolved
from tests.golden.cases import VECTORS
from tests.golden.test_presets import (
    CLOSE,
    first_of_each,
    groups_of,
    judged,
    loss_of,
    recorded,
    rewards_of,
)
from tests.golden.test_presets import (
    __name__ as GIVEN,
)
from tests.golden.through_objective import Step

TRL = {
    "model_name_or_path": "m",
    "dataset_name": "d",
    "reward_funcs": ["r.f"],
    "num_processes": 1,
    "max_steps": 4,
    "steps_per_generation": 2,  # two updates of a generation, so that bounds act
}
VERL = {
    "actor_rollout_ref.model.path": "m",
    "critic.model.path": "m",
    "data.train_files": "d.parquet",
    "trainer.total_training_steps": 4,
    "data.train_batch_size": 512,
    "algorithm.adv_estimator": "grpo",
}
ACTOR = "actor_rollout_ref.actor"
REFUSED_OF_TRL = {"bnpo", "bnpo.kl", "gspo.bnpo", "vespo", "entropy_bonus"}
REFUSED_OF_VERL = {"vanilla.agg_seq-mean-token-sum-norm", "clip_cov.all", "clip_cov.none"} | {
    *(
        "dppo_tv.default",
        "dppo_tv.tight",
        "dppo_kl.default",
        "dppo_kl.tight",
        "geo_mean.default",
        "geo_mean.w4",
        "kl_cov.r20",
        "kl_cov.r50",
    )
}
WEIGHTED = ("vllm_is", ".is_w")
"""Cases with importance weights that were given to the peer: what makes the weights is compared elsewhere."""


def algorithm_of(peer: str, settings: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    made = imported(base | settings, PEERS[peer], source="a recorded case").settings
    prefix = "algorithm."
    algorithm = {name.removeprefix(prefix): value for name, value in made.items() if name.startswith(prefix)}
    return resolved(algorithm, max_tokens=made["sampling.max_tokens"])


def objective_of(algorithm: dict[str, Any], **changes: Any) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(algorithm | changes), updates_per_step=2)


def configs(case: str) -> dict[str, dict[str, Any]]:
    variants = json.loads((VECTORS / case / "case.json").read_text())["variants"]
    return {
        name: variant["config"] or {}
        for name, variant in variants.items()
        if not variant.get("expected_error") and not any(each in name for each in WEIGHTED)
    }


def of_trl(config: dict[str, Any]) -> dict[str, Any]:
    """As GRPOConfig has it, where `epsilon_low` is `epsilon`."""
    own = ("epsilon_low", "old_per_token_logps", "_entropy_bonus_enabled")
    return {"epsilon": config["epsilon_low"]} | {name: value for name, value in config.items() if name not in own}


def of_verl(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The functions of GSPO and SAPO have an aggregation of their own, where none is given."""
    mode = name.partition(".")[0]
    default = "seq-mean-token-mean" if mode in ("gspo", "sapo") else "token-mean"
    actor = config["actor_config"] | {"loss_agg_mode": config["kwargs"].get("loss_agg_mode", default)}
    place = {"dro_beta": f"{ACTOR}.policy_loss.dro_beta"}
    settings = {place.get(key, f"{ACTOR}.{key}"): value for key, value in actor.items()}
    return settings | {f"{ACTOR}.policy_loss.loss_mode": mode}


LOSSES_OF_TRL, LOSSES_OF_VERL = configs("trl/loss__full_mild"), configs("verl/policy_loss__ragged_mild")


@pytest.mark.parametrize("variant", sorted(LOSSES_OF_TRL.keys() - REFUSED_OF_TRL))
def test_a_loss_of_trl_is_the_same(variant):
    config = LOSSES_OF_TRL[variant]
    given, want = recorded("trl/loss__full_mild", variant)
    policy_BT, advantages = given["log_probs"].requires_grad_(), given["advantages"]
    sampled_BT = given["rollout_log_probs"]
    sampled_BT = torch.where(sampled_BT.isnan(), policy_BT.detach(), sampled_BT)
    step = Step(
        policy_BT=policy_BT,
        old_BT=given["old_log_probs"] if config["old_per_token_logps"] else policy_BT.detach(),
        advantages_BT=advantages[:, None].expand(policy_BT.shape),
        mask=given["mask"].bool(),
        reference_BT=given["ref_log_probs"] if config["beta"] else None,
        rollout_BT=None if config["off_policy_mask_threshold"] is None else sampled_BT,
        entropies_BT=given["entropy"],
    )
    loss = loss_of(objective_of(algorithm_of("trl", of_trl(config), TRL), advantage=f"{GIVEN}:given_advantages"), step)
    if config["loss_type"] in ("dapo", "cispo"):
        # The case counts tokens of a whole generation, of which it has a part.
        loss = loss * float(step.mask.sum()) / float(given["num_items_in_batch"])
    assert_the_same(loss, policy_BT, want)


@pytest.mark.parametrize("variant", sorted(LOSSES_OF_VERL.keys() - REFUSED_OF_VERL))
def test_a_loss_of_verl_is_the_same(variant):
    given, want = recorded("verl/policy_loss__ragged_mild", variant)
    policy_BT = given["log_probs"].requires_grad_()
    step = Step(
        policy_BT=policy_BT,
        old_BT=given["old_log_probs"],
        advantages_BT=given["advantages"],
        mask=given["mask"].bool(),
    )
    algorithm = algorithm_of("verl", of_verl(variant, LOSSES_OF_VERL[variant]), VERL)
    assert_the_same(loss_of(objective_of(algorithm, advantage=f"{GIVEN}:given_advantages"), step), policy_BT, want)


def assert_the_same(loss: Tensor, policy_BT: Tensor, want: dict[str, Any]) -> None:
    torch.testing.assert_close(float(loss.detach()), float(want["loss"]), **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, policy_BT)[0], want["grad.log_probs"], **CLOSE)


@pytest.mark.parametrize("variant", sorted(REFUSED_OF_TRL))
def test_a_loss_of_trl_that_is_not_the_same_is_refused(variant):
    with pytest.raises(ConfigError):
        algorithm_of("trl", of_trl(LOSSES_OF_TRL[variant]), TRL)


@pytest.mark.parametrize("variant", sorted(REFUSED_OF_VERL))
def test_a_loss_of_verl_that_is_not_the_same_is_refused(variant):
    with pytest.raises(ConfigError):
        algorithm_of("verl", of_verl(variant, LOSSES_OF_VERL[variant]), VERL)


ADVANTAGES_OF_TRL = {
    name: config for name, config in configs("trl/advantages__g4__normal").items() if name.startswith("sum.")
}


@pytest.mark.parametrize("variant", ADVANTAGES_OF_TRL)
def test_an_advantage_of_trl_is_the_same(variant):
    given, want = recorded("trl/advantages__g4__normal", variant)
    settings = ADVANTAGES_OF_TRL[variant]
    algorithm = algorithm_of("trl", settings | {"reward_funcs": ["r.a", "r.b"]}, TRL)
    rewards_N = (given["rewards_per_func"] * torch.tensor(settings["reward_weights"])).sum(1)
    assert_the_same_advantages(algorithm, rewards_N, given, want)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("grpo.eps1e-06.std", {"algorithm.adv_estimator": "grpo"}),
        ("grpo.eps1e-06.nostd", {"algorithm.norm_adv_by_std_in_grpo": False}),
        ("grpo_vectorized", {"algorithm.adv_estimator": "grpo_vectorized"}),
        ("grpo_passk", {"algorithm.adv_estimator": "grpo_passk"}),
        ("rloo", {"algorithm.adv_estimator": "rloo"}),
        ("rloo_vectorized", {"algorithm.adv_estimator": "rloo_vectorized"}),
        ("gpg", {"algorithm.adv_estimator": "gpg"}),
    ],
)
def test_an_advantage_of_verl_is_the_same(variant, settings):
    given, want = recorded("verl/adv__g2__normal", variant)
    assert_the_same_advantages(algorithm_of("verl", settings, VERL), rewards_of(given), given, want)


def assert_the_same_advantages(
    algorithm: dict[str, Any], rewards_N: Tensor, given: dict[str, Any], want: dict[str, Any]
) -> None:
    objective = objective_of(algorithm, proximal="rollout")
    got_N = objective.prepare(judged(rewards_N, groups_of(given))).advantages_NT[:, 0]
    torch.testing.assert_close(got_N, first_of_each(given, want).to(got_N.dtype), **CLOSE)

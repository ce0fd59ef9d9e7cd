"""A preset that is named for a system, against that version's own numbers, through a run's objective: advantages, loss and gradient.

Cases without padding, where the peers' different ways to count it agree.
"""

import dataclasses
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.registry.presets import PRESETS, VERSIONS, expand
from tests.golden import logprobs
from tests.golden.cases import VECTORS
from tests.golden.models import load_model
from tests.golden.through_objective import Step

CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def recorded(case: str, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs."""
    data = load_file(VECTORS / case / "data.safetensors")
    said = json.loads((VECTORS / case / "case.json").read_text())
    inputs = {name: item["json"] for name, item in said["inputs"].items() if "json" in item}
    inputs |= {name.removeprefix("in."): tensor for name, tensor in data.items() if name.startswith("in.")}
    numbers = {name: item.get("value") for name, item in said["variants"][variant]["outputs"].items()}
    head = f"out.{variant}."
    return inputs, numbers | {n.removeprefix(head): tensor for n, tensor in data.items() if n.startswith(head)}


def objective(preset: str, **overrides: Any) -> Objective:
    return Objective.from_config(
        AlgorithmConfig.model_validate(expand({"preset": preset} | overrides)), updates_per_step=2
    )


def given_advantages(token_rewards_NT: Tensor) -> Tensor:
    """Advantages that a case states travel as rewards per token."""
    return token_rewards_NT


def given_returns(token_rewards_NT: Tensor, *, entropies_NT: Tensor) -> tuple[Tensor, Tensor]:
    """And the returns of the critic as entropies, of which PPO has no use."""
    return token_rewards_NT, entropies_NT


def loss_of(made: Objective, step: Step, **more: Tensor) -> Tensor:
    prepared = made.prepare(dataclasses.replace(step.batch(step.mask.any(1)), **more))
    return made.loss(prepared, policy_logprobs_BT=step.policy_BT, entropies_BT=step.entropies_BT).loss


@pytest.mark.parametrize(
    ("preset", "case", "variant", "changes"),
    [
        ("lightrft_group_norm", "lightrft/losses__full_mild", "policy.ppo.0.2", {"kl": {"loss": None}}),
        ("trl_grpo", "trl/loss__full_mild", "grpo.default", {}),
        ("trl_grpo", "trl/loss__full_mild", "grpo.kl", {"kl": {"loss": {"coefficient": 0.04, "estimator": "k3"}}}),
        ("verl_grpo", "verl/policy_loss__ragged_mild", "vanilla.default", {}),
        ("verl_grpo", "verl/policy_loss__extreme", "vanilla.default", {}),
    ],
)
def test_the_loss_of_a_preset_is_its_systems(preset, case, variant, changes):
    given, want = recorded(case, variant)
    policy_BT, advantages_BT = given["log_probs"].requires_grad_(), given["advantages"]
    step = Step(
        policy_BT=policy_BT,
        old_BT=given["old_log_probs"],
        advantages_BT=advantages_BT if advantages_BT.dim() == 2 else advantages_BT[:, None].expand(policy_BT.shape),
        mask=given["mask"].bool(),
        reference_BT=given.get("ref_log_probs"),
    )
    loss = loss_of(objective(preset, advantage=f"{__name__}:given_advantages", **changes), step)
    torch.testing.assert_close(float(loss.detach()), float(want["loss"]), **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, policy_BT)[0], want["grad.log_probs"], **CLOSE)


@pytest.mark.parametrize("case", ["rl_step__mild", "rl_step__b1", "rl_step__onpolicy"])
@pytest.mark.parametrize(
    ("preset", "folder"), [("tapeagents_grpo", "tapeagents"), ("tapeagents_0_1_0_grpo", "tapeagents_seed")]
)
def test_a_step_of_tapeagents_is_that_versions(preset, folder, case):
    given, want = recorded(f"{folder}/{case}", "grpo.default")
    model = load_model(VECTORS)
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits[:, :-1]
    step = Step(
        policy_BT=logprobs.token_logprobs(logits, token_ids_BT=given["input_ids"][:, 1:]),
        old_BT=given["old_logprobs"][:, 1:],
        advantages_BT=given["advantages"][:, 1:],
        mask=(given["labels"] != -100)[:, 1:],
        reference_BT=given["ref_logprobs"][:, 1:],
    )
    loss = loss_of(objective(preset, advantage=f"{__name__}:given_advantages"), step)
    loss.backward()
    torch.testing.assert_close(float(loss.detach()), float(want["loss"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.lm_head.weight.grad, want["grad.lm_head"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case", ["torchrl/grpo__full_mild", "torchrl_seed/grpo__b1_mild", "torchrl_seed/grpo__t1_wide"]
)
def test_grpo_of_torchrl_is_both_versions_where_nothing_is_padded(case):
    given, want = recorded(case, "grpo.default")
    assert bool(given["mask"].all()) and bool((given["old_log_probs"] != 0).all())
    logits = given["logits"].requires_grad_()
    step = Step(
        policy_BT=logprobs.token_logprobs(logits, token_ids_BT=given["tokens"]),
        old_BT=given["old_log_probs"],
        advantages_BT=given["advantage"].squeeze(-1),
        mask=given["mask"].bool(),
        entropies_BT=logprobs.entropies(logits),
    )
    loss = loss_of(objective("torchrl_grpo", advantage=f"{__name__}:given_advantages"), step)
    total = float(want["loss_objective"]) + float(want["loss_entropy"])
    torch.testing.assert_close(float(loss.detach()), total, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], want["grad_total.logits"], **CLOSE)


@pytest.mark.parametrize("case", ["ppo__full_mild", "ppo__onpolicy", "ppo__extreme"])
def test_ppo_of_torchtune_is_its_policy_and_its_critic(case):
    given, want = recorded(f"torchtune/{case}", "ppo.0.1_0.2_0.1.nomask")
    policy_BT, values_BT = given["log_probs"].requires_grad_(), given["values"].requires_grad_()
    everything = torch.ones_like(given["mask"], dtype=torch.bool)
    step = Step(policy_BT=policy_BT, old_BT=given["old_log_probs"], advantages_BT=given["advantages"], mask=everything)
    made = objective("torchtune_ppo", advantage=f"{__name__}:given_returns", advantage_shaping=[], kl={"reward": None})
    batch = dataclasses.replace(
        step.batch(everything.any(1)), values_NT=given["old_values"], entropies_NT=given["returns"]
    )
    loss = made.loss(made.prepare(batch), policy_logprobs_BT=policy_BT, values_BT=values_BT).loss
    torch.testing.assert_close(float(loss.detach()), float(want["loss"]), **CLOSE)
    for gradient, name in zip(torch.autograd.grad(loss, (policy_BT, values_BT)), ("log_probs", "values"), strict=True):
        torch.testing.assert_close(gradient, want[f"grad.{name}"], **CLOSE)


@pytest.mark.parametrize(
    ("preset", "case", "variant"),
    [
        ("tapeagents_grpo", "tapeagents/advantages__g4.binary", "kl0.0"),
        ("tapeagents_0_1_0_grpo", "tapeagents_seed/advantages__g4x3.normal", "kl0.0"),
        ("trl_grpo", "trl/advantages__g4__normal", "sum.group.(1.0, 1.0)"),
        ("verl_grpo", "verl/adv__g2__normal", "grpo.eps1e-06.std"),
        ("lightrft_group_norm", "lightrft/shaping__group_norm__huge__2x4", "process_experiences"),
    ],
)
def test_the_advantages_of_a_preset_are_its_systems(preset, case, variant):
    given, want = recorded(case, variant)
    got_N = objective(preset).prepare(judged(rewards_of(given), groups_of(given))).advantages_NT[:, 0]
    torch.testing.assert_close(got_N, first_of_each(given, want).to(got_N.dtype), **CLOSE)


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        ("torchrl/mcadvantage__fix_dense", "g4.sum"),
        ("torchrl/mcadvantage__var_last", "g2.sum.cand5.min5"),
        ("torchrl_seed/mcadvantage__t1_normal", "g4"),
    ],
)
def test_the_advantages_of_torchrl_are_those_of_each_group_that_it_releases(case, variant):
    """By the return of a trajectory, or, which is the same where each has one step, over the steps of all: its default."""
    given, want = recorded(case, variant)
    rewards = given["rewards"].split(given["lengths"].tolist())
    returns = dict(zip(given["traj_ids"].tolist(), [each.sum() for each in rewards], strict=True))
    releases = [f"rel{number}" for number in range(int(want["n_releases"]))]
    firsts = {release: want[f"{release}.step"] == 0 for release in releases}
    ids = [want[f"{release}.traj_id"][first].tolist() for release, first in firsts.items()]
    batch = judged(
        torch.stack([returns[identity] for group in ids for identity in group]),
        torch.tensor([place for place, group in enumerate(ids) for _ in group]),
    )
    expected_N = torch.cat([want[f"{release}.advantage"].flatten()[first] for release, first in firsts.items()])
    got_N = objective("torchrl_grpo").prepare(batch).advantages_NT[:, 0]
    assert len(releases) > 1
    torch.testing.assert_close(got_N, expected_N.to(got_N.dtype), **CLOSE)


def test_the_advantages_of_torchtune_come_of_its_scores_its_kl_and_its_critic():
    """The recipe's own, with the parameters of the preset: score on the last token, less KL per token, GAE, whitened with the mean left."""
    given, want = recorded("torchtune/ppo_updates", "ppo.2x4")
    logprobs_NT = given["policy_table"].log_softmax(-1)[given["states"]]
    logprobs_NT = logprobs_NT.gather(-1, given["tokens"][..., None])[..., 0]
    batch = judged(
        given["scores"],
        torch.arange(8),
        loss_mask_NT=torch.ones_like(given["mask"], dtype=torch.bool),
        rollout_logprobs_NT=logprobs_NT,
        reference_logprobs_NT=given["ref_log_probs"],
        values_NT=given["value_table"][given["states"]],
    )
    prepared = objective("torchtune_ppo").prepare(batch)
    torch.testing.assert_close(prepared.advantages_NT, want["advantages"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", ["ppo__full_mild", "ppo__onpolicy", "ppo__extreme"])
def test_the_advantages_and_returns_of_torchtune_are_its_gae(case):
    given, want = recorded(f"torchtune/{case}", "estimate_advantages.1.0_0.95.nomask")
    rewards_NT = given["token_rewards"]
    batch = judged(
        rewards_NT.sum(1),
        torch.arange(len(rewards_NT)),
        loss_mask_NT=torch.ones_like(rewards_NT, dtype=torch.bool),
        rollout_logprobs_NT=given["old_log_probs"],
        reference_logprobs_NT=given["old_log_probs"],
        values_NT=given["values"],
        token_rewards_NT=rewards_NT,
    )
    prepared = objective("torchtune_ppo").prepare(batch)
    torch.testing.assert_close(prepared.advantages_NT.float(), want["advantages"], **CLOSE)
    torch.testing.assert_close(prepared.returns_NT.float(), want["returns"], **CLOSE)


def judged(rewards_N: Tensor, groups_N: Tensor, **tokens: Tensor) -> BatchTensors:
    """Trajectories of one token, unless `tokens` has more."""
    mask_NT = tokens.pop("loss_mask_NT", torch.ones(len(rewards_N), 1, dtype=torch.bool))
    zeros_NT = torch.zeros(mask_NT.shape, dtype=rewards_N.dtype)
    of_tokens = {"rollout_logprobs_NT": zeros_NT, "reference_logprobs_NT": zeros_NT} | tokens
    return BatchTensors(
        loss_mask_NT=mask_NT,
        policy_versions_NT=torch.zeros(mask_NT.shape, dtype=torch.int64),
        rewards_N=rewards_N,
        group_index_N=groups_N,
        truncated_N=torch.zeros(len(rewards_N), dtype=torch.bool),
        completion_lengths_N=mask_NT.sum(1),
        trajectory_ids=[str(row) for row in range(len(rewards_N))],
        group_ids=[str(group) for group in groups_N.tolist()],
        prompt_ids=[str(group) for group in groups_N.tolist()],
        current_version=0,
        **of_tokens,
    )


def rewards_of(given: dict[str, Any]) -> Tensor:
    if "rewards_per_func" in given:
        return given["rewards_per_func"].sum(1)
    if "token_rewards" in given:
        return (given["token_rewards"] * given["mask"]).sum(1)
    return given["reward"] if "reward" in given else given["rewards"]


def groups_of(given: dict[str, Any]) -> Tensor:
    if "group_id" in given:
        names = sorted(set(given["group_id"]))
        return torch.tensor([names.index(name) for name in given["group_id"]])
    if "group_index" in given:
        return torch.tensor(given["group_index"])
    size = given.get("num_generations") or given["n_samples_per_prompt"]
    return torch.arange(len(rewards_of(given))) // size


def first_of_each(given: dict[str, Any], want: dict[str, Any]) -> Tensor:
    """One advantage per trajectory: peers repeat it over the tokens."""
    if "lengths" in given:
        starts = given["lengths"].cumsum(0) - given["lengths"]
        return want["advantages"][starts]
    found = want["advantages"] if "advantages" in want else want["rewards"]
    return found if found.dim() == 1 else found[torch.arange(len(found)), given["mask"].int().argmax(1)]


def test_every_preset_that_is_named_for_a_system_says_of_which_version():
    systems = ("tapeagents", "torchrl", "lightrft", "trl", "verl", "torchtune")
    assert {name for name in PRESETS if name.startswith(systems)} == set(VERSIONS)

"""A peer's whole update, over epochs and mini-batches, by the road of a step: `Objective.prepare` once, then for each mini-batch
`Objective.mini_batch`, `Objective.loss` and `Optimizer.step`.

Policy and value function are tables over states, so that an update sees what those before it changed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.config import OptimizerConfig
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.optimizer import Optimizer
from tests.golden.cases import Variant
from tests.golden.verl_policy import AGGREGATIONS, CLAMP


def torchtune(v: Variant) -> dict[str, Any]:
    """The recipe `ppo_full_finetune_single_device`, steps 2 to 4: rewards and advantages once, then PPO over shuffled mini-batches."""
    epsilon, rate = v.option("epsilon"), v.option("lr")
    algorithm = {
        "advantage": {"name": "gae", "gamma": v.option("gamma"), "lambda_": v.option("lmbda")},
        "advantage_shaping": [{"name": "whiten", "center": False}],
        "policy_loss": {"name": "ppo_clip", "epsilon_low": epsilon, "epsilon_high": epsilon},
        "kl": {"reward": {"coefficient": v.option("kl_coeff"), "estimator": "k1"}},
        "value": {
            "loss": {"name": "value_clip", "clip_range": v.option("value_clip_range")},
            "coefficient": v.option("value_coeff"),
            "learning_rate": rate,
        },
    }
    return _updated(
        v,
        algorithm=algorithm,
        optimizer=OptimizerConfig(learning_rate=rate, max_grad_norm=None),
        mask=torch.ones_like(v.mask()),
        epochs=v.option("ppo_epochs"),
        size=v.option("ppo_batch_size"),
    )


def verl(v: Variant) -> dict[str, Any]:
    """`train_mini_batch` of actor and critic, which share no weights: their losses add up, each optimizer is a learning rate of ours."""
    kl, rate = v.option("kl_loss_coef"), v.option("lr")
    algorithm: dict[str, Any] = {
        "advantage": {"name": "grpo", "epsilon": 1e-6},
        "policy_loss": {
            "name": "ppo_clip",
            "epsilon_low": v.option("clip_ratio_low"),
            "epsilon_high": v.option("clip_ratio_high"),
            "dual_clip": 3.0,
            "log_ratio_clamp": CLAMP,
        },
        "aggregation": AGGREGATIONS[v.option("loss_agg_mode")],
        "entropy_coefficient": v.option("entropy_coeff"),
        "kl": {"loss": {"coefficient": kl, "estimator": "k3", "log_ratio_clamp": CLAMP}} if kl else {},
    }
    critic = {name: v.option(name) for name in ("gamma", "lam", "cliprange_value", "critic_lr")}
    if v.option("adv_estimator") == "gae":
        algorithm |= {
            "advantage": {"name": "gae", "gamma": critic["gamma"], "lambda_": critic["lam"]},
            "advantage_shaping": ["whiten"],
            "value": {
                "loss": {"name": "value_clip", "clip_range": critic["cliprange_value"]},
                "coefficient": 1.0,
                "aggregation": AGGREGATIONS[v.option("loss_agg_mode")],
                "learning_rate": critic["critic_lr"],
            },
        }
    return _updated(
        v,
        algorithm=algorithm,
        optimizer=OptimizerConfig(
            learning_rate=rate, weight_decay=v.option("weight_decay"), max_grad_norm=v.option("clip_grad")
        ),
        mask=v.mask(),
        epochs=v.option("ppo_epochs"),
        size=v.option("ppo_mini_batch_size"),
    )


class _Tables:
    """A policy and a value function without a network."""

    def __init__(self, v: Variant) -> None:
        self.policy, self.values = nn.Parameter(v["policy_table"].clone()), nn.Parameter(v["value_table"].clone())
        self._states, self._tokens = v["states"], v["tokens"]

    def __call__(self, rows: Tensor) -> dict[str, Tensor]:
        """What a forward pass gives of these trajectories."""
        logprobs = self.policy.log_softmax(-1)[self._states[rows]]
        return {
            "policy_logprobs_BT": logprobs.gather(-1, self._tokens[rows][..., None])[..., 0],
            "entropies_BT": -(logprobs.exp() * logprobs).sum(-1),
            "values_BT": self.values[self._states[rows]],
        }


def _updated(
    v: Variant,
    *,
    algorithm: dict[str, Any],
    optimizer: OptimizerConfig,
    mask: Tensor,
    epochs: int,
    size: int,
) -> dict[str, Any]:
    config = AlgorithmConfig.model_validate(algorithm | {"proximal": "recompute"})
    objective = Objective.from_config(config, updates_per_step=epochs * len(mask) // size)
    tables = _Tables(v)
    steps = Optimizer(
        [("policy", tables.policy), ("critic.values", tables.values)],
        config=optimizer,
        num_steps=1,
        compute_dtype=torch.float64,
        learning_rates={} if config.value is None else {"critic.": config.value.learning_rate},
        has_own_critic=config.value is not None,
    )
    with torch.no_grad():
        prepared = objective.prepare(_batch(v, tables(torch.arange(len(mask))), mask=mask, needs=objective.needs))
    losses, fractions = [], []
    for epoch in range(epochs):
        for rows in v["order"][epoch].split(size):
            part = objective.mini_batch(prepared, rows.tolist(), begins_step=not losses)
            result = objective.loss(part, **tables(rows))
            steps.zero()
            result.loss.backward()
            steps.step(0, gradient_norms=steps.gradient_norms())
            losses.append(result.loss.detach())
            fractions.append(result.statistics.compute()["clip_fraction"])
    return {
        "policy_table": tables.policy.detach(),
        "value_table": tables.values.detach(),
        "advantages": prepared.advantages_NT,
        "clipfrac": torch.tensor(fractions, dtype=torch.float64),
        "loss": torch.stack(losses),
    }


def _batch(v: Variant, begins: dict[str, Tensor], *, mask: Tensor, needs: frozenset[str]) -> BatchTensors:
    """The trajectories that the tables, as they are at the start, sampled; groups are of four."""
    num_rows = len(mask)
    return BatchTensors(
        loss_mask_NT=mask,
        rollout_logprobs_NT=begins["policy_logprobs_BT"],
        policy_versions_NT=torch.zeros_like(v["tokens"]),
        rewards_N=v["scores"],
        group_index_N=torch.arange(num_rows) // 4,
        truncated_N=torch.zeros(num_rows, dtype=torch.bool),
        completion_lengths_N=mask.sum(1),
        trajectory_ids=[str(row) for row in range(num_rows)],
        group_ids=[str(row // 4) for row in range(num_rows)],
        prompt_ids=[str(row // 4) for row in range(num_rows)],
        current_version=0,
        reference_logprobs_NT=v["ref_log_probs"],
        proximal_logprobs_NT=begins["policy_logprobs_BT"],
        values_NT=begins["values_BT"] if "values" in needs else None,
    )

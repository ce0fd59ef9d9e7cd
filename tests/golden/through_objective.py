"""A peer's loss by the road that a run takes: parts named in config, a batch, `Objective.prepare`, `Objective.loss`.

A case that no configuration can state (weights given as numbers), or that a run refuses (a log-prob that is not finite where it counts),
goes through the same parts by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import Plugin
from learner.algorithms import kl
from learner.algorithms.batch_rules.aggregation import aggregate
from learner.algorithms.batch_rules.filters import Selection
from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.masks import masked
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.registry.variants import Variant

Plugins = Mapping[str, Any]
"""An algorithm section, or one variant of it, as a run file would say it."""


def advantages_by_objective(algorithm: Plugins, *, rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """Of trajectories of one token each, whose own reward is 1."""
    ones_NT = torch.ones(len(rewards_N), 1, dtype=rewards_N.dtype)
    step = Step(policy_BT=-ones_NT, old_BT=-ones_NT, advantages_BT=ones_NT, mask=ones_NT.bool())
    batch = replace(step.batch(step.mask.any(1)), rewards_N=rewards_N, group_index_N=group_index_N)
    return Objective.from_config(AlgorithmConfig.model_validate(algorithm)).prepare(batch).advantages_NT[:, 0]


def aggregated(losses_BT: Tensor, aggregation: Plugins, mask: Tensor) -> Tensor:
    """Σ w·l with the named aggregation's weights."""
    return aggregate(losses_BT, weights_BT=_variant(aggregation, "aggregation").with_given({"loss_mask_NT": mask}))


def advantages_less_kl(
    algorithm: Plugins, *, rewards_N: Tensor, group_index_N: Tensor, kl_NT: Tensor, mask: Tensor
) -> Tensor:
    """Per token; `kl_NT` is the log-ratio to the reference. No row may be all masked."""
    step = Step(policy_BT=kl_NT, old_BT=torch.zeros_like(kl_NT), advantages_BT=kl_NT, mask=mask, reference_BT=-kl_NT)
    batch = replace(step.batch(mask.any(1)), rewards_N=rewards_N, group_index_N=group_index_N, token_rewards_NT=None)
    return Objective.from_config(AlgorithmConfig.model_validate(algorithm)).prepare(batch).advantages_NT


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tensors of one optimizer step."""

    policy_BT: Tensor
    old_BT: Tensor
    advantages_BT: Tensor
    mask: Tensor
    rollout_BT: Tensor | None = None
    """None: the old policy sampled."""
    reference_BT: Tensor | None = None
    entropies_BT: Tensor | None = None

    def tokens(self, policy_loss: Plugins, **more: Tensor) -> TokenLosses:
        """The named loss per token, its parameters checked and bound as a run's are."""
        result = _variant(policy_loss, "policy_loss").with_given(self._supply() | more)
        return result if isinstance(result, TokenLosses) else TokenLosses(result)

    def correction(self, corrections: Sequence[Plugins]) -> Tensor:
        """Product of the named corrections."""
        weights_BT = torch.ones_like(self.policy_BT)
        for each in corrections:
            weights_BT = weights_BT * _variant(each, "corrections").with_given(self._supply())
        return weights_BT

    def chosen(self, filters: Sequence[Plugins]) -> Selection:
        """Tokens with a policy gradient, tokens of the denominator."""
        gradient_BT = denominator_BT = self.mask
        for each in filters:
            found = _variant(each, "filters").with_given({"entropies_NT": self.entropies_BT, "loss_mask_NT": self.mask})
            gradient_BT, denominator_BT = gradient_BT & found.gradient_NT, denominator_BT & found.denominator_NT
        return Selection(gradient_BT, denominator_BT)

    def loss(self, algorithm: Plugins, *, weights_BT: Tensor | None = None) -> Tensor:
        """Of the policy, and of the KL to the reference where `algorithm` has one. `weights_BT` come on top of its corrections."""
        penalty = algorithm.get("kl", {}).get("loss")
        # Where the trainer's π_old is not the policy that sampled, TRL's correction of the KL is not ours.
        is_ours = penalty is None or penalty["estimator"] != "unbiased" or self.rollout_BT is None
        is_said = weights_BT is None and is_ours and "cov" not in algorithm["policy_loss"]["name"]
        if is_said and self._can_be_carried():
            return self._by_objective(algorithm)
        selection = self.chosen(algorithm.get("filters", ()))
        losses_BT = masked(self.tokens(algorithm["policy_loss"]).losses_BT, mask_BT=selection.gradient_NT)
        losses_BT = losses_BT * self.correction(algorithm.get("corrections", ()))
        losses_BT = losses_BT if weights_BT is None else losses_BT * weights_BT
        if self.reference_BT is not None and penalty is not None:
            settings = {name: value for name, value in penalty.items() if name != "coefficient"}
            losses_BT = losses_BT + penalty["coefficient"] * self.kl(**settings)
        return aggregated(losses_BT, algorithm["aggregation"], selection.denominator_NT)

    def kl(self, *, estimator: str = "k3", log_ratio_clamp: float | None = None) -> Tensor:
        """To the reference."""
        given = {"other_logprobs_BT": self.reference_BT, "loss_mask_BT": self.mask, "log_ratio_clamp": log_ratio_clamp}
        if estimator == "unbiased":
            return kl.unbiased(self.policy_BT, **given, rollout_logprobs_BT=self.old_BT)
        return kl.ESTIMATORS[estimator](self.policy_BT, **given)

    def _corrections(self, algorithm: Plugins) -> list[Variant]:
        return [_variant(each, "corrections") for each in algorithm.get("corrections", ())]

    def _supply(self) -> dict[str, Tensor | None]:
        return {
            "policy_logprobs_BT": self.policy_BT,
            "proximal_logprobs_BT": self.old_BT,
            "rollout_logprobs_BT": self.old_BT if self.rollout_BT is None else self.rollout_BT,
            "advantages_BT": self.advantages_BT,
            "loss_mask_BT": self.mask,
            **self._covariances(),
        }

    def _covariances(self) -> dict[str, Tensor]:
        """Under the present policy; an objective takes them at the start of the step, so these losses go by hand."""
        from learner.algorithms.losses.covariance import covariances

        found_BT = covariances(self.policy_BT.detach(), advantages_NT=self.advantages_BT, loss_mask_NT=self.mask)
        return {"covariances_BT": found_BT, "batch_covariances_M": found_BT[self.mask]}

    def _can_be_carried(self) -> bool:
        """True where a run would take these rows: one dtype, and all finite where it counts."""
        every = (self.policy_BT, self.old_BT, self.advantages_BT, self.rollout_BT, self.reference_BT, self.entropies_BT)
        given = [x_BT for x_BT in every if x_BT is not None]
        is_finite = all(bool(torch.isfinite(x_BT[self.mask]).all()) for x_BT in given)
        return bool(self.mask.any()) and is_finite and len({x_BT.dtype for x_BT in given}) == 1

    def _by_objective(self, algorithm: Plugins) -> Tensor:
        """Rows with nothing unmasked are not in the batch; where the aggregation counts them they are put into its mean here."""
        rows = self.mask.any(1)
        aggregation = {key: value for key, value in algorithm["aggregation"].items() if key != "empty_rows"}
        given = {"advantage": "token_rewards"} | dict(algorithm) | {"aggregation": aggregation}
        compared = (_variant(algorithm["policy_loss"], "policy_loss"), *self._corrections(algorithm))
        if any("proximal_logprobs_BT" in variant.asks for variant in compared):
            given |= {"proximal": "recompute"}
        objective = Objective.from_config(AlgorithmConfig.model_validate(given), updates_per_step=2)
        loss = objective.loss(
            objective.prepare(self.batch(rows)),
            policy_logprobs_BT=self.policy_BT[rows],
            entropies_BT=None if self.entropies_BT is None else self.entropies_BT[rows],
        ).loss
        is_counted = algorithm["aggregation"].get("empty_rows") == "count"
        return loss * (rows.double().mean().item() if is_counted else 1.0)

    def batch(self, rows: Tensor) -> BatchTensors:
        """These rows, each a group of its own. The advantages that a case states travel as rewards per token."""
        num_rows, width = int(rows.sum()), self.mask.shape[1]
        sampled_BT = self.old_BT if self.rollout_BT is None else self.rollout_BT

        def of_rows(x_BT: Tensor | None) -> Tensor | None:
            return None if x_BT is None else x_BT.detach()[rows]

        return BatchTensors(
            loss_mask_NT=self.mask[rows],
            rollout_logprobs_NT=sampled_BT.detach()[rows],
            policy_versions_NT=torch.zeros(num_rows, width, dtype=torch.int64),
            rewards_N=torch.zeros(num_rows, dtype=self.policy_BT.dtype),
            group_index_N=torch.arange(num_rows),
            truncated_N=torch.zeros(num_rows, dtype=torch.bool),
            completion_lengths_N=torch.full((num_rows,), width),
            trajectory_ids=[str(row) for row in range(num_rows)],
            group_ids=[str(row) for row in range(num_rows)],
            prompt_ids=[str(row) for row in range(num_rows)],
            current_version=0,
            reference_logprobs_NT=of_rows(self.reference_BT),
            proximal_logprobs_NT=of_rows(self.old_BT),
            entropies_NT=of_rows(self.entropies_BT),
            token_rewards_NT=torch.where(self.mask, self.advantages_BT.detach(), 0)[rows],
        )


def _variant(plugin: Plugins, field: str) -> Variant:
    return Variant.from_plugin(Plugin.model_validate(plugin), field=field)

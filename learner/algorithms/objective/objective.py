"""The objective of a run: the configured parts, composed. `prepare` runs once per step, `loss` once per micro-batch.

`prepare` computes all that needs the whole batch: shaping, advantages, filters, aggregation weights. A micro-batch's loss is then a sum
over its own rows, and any split of the rows gives the same loss, gradient and statistics. A step of several updates takes out a mini-batch
for each: advantages and filters are the step's, aggregation weights the mini-batch's own.
Numbers per token are float64: no ratio of log-probs down to -700 overflows or underflows, and a gradient that float32 cannot hold
is inf or 0, never NaN.
Shapes: B rows of a micro-batch, T tokens, C demonstrated tokens.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import AdaptiveKlConfig, AlgorithmConfig, KlConfig
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin, parameter_names
from cluster.contracts.types import GroupSummary
from learner.algorithms.kl import adapted_coefficient
from learner.algorithms.moments import RunningMoments
from learner.algorithms.objective import checks, group_rules
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.inert import refuse_inert
from learner.algorithms.objective.loss import LossResult, imitation_loss, loss
from learner.algorithms.objective.parts import Parts
from learner.algorithms.objective.passport import formula
from learner.algorithms.objective.preparation import mini_batch, prepare
from learner.algorithms.objective.recording import of_the_batch
from learner.algorithms.objective.statistics import Statistics
from learner.algorithms.objective.streaming import EarlierReturns
from learner.algorithms.registry.homes import HOMES


class Objective:
    """The loss of a run. State: adaptive KL coefficients, running moments of rewards and returns, earlier returns by prompt."""

    def __init__(self, parts: Parts, *, updates_per_step: int = 1) -> None:
        self._parts, self._updates_per_step = parts, updates_per_step
        terms = {name: getattr(parts.config.kl, name) for name in KlConfig.model_fields}
        self.kl_coefficients: dict[str, float] = {
            name: each.coefficient for name, each in terms.items() if each is not None
        }
        """Present β of each term of `kl` that the run has; only `adaptive` terms change it."""
        value = parts.config.value
        streaming = parts.config.streaming
        self._earlier = streaming and EarlierReturns(config=streaming)
        steps = [step.field for step in parts.reward_shaping if "reward_moments" in step.asks]
        returns = ["returns"] if value is not None and value.normalise_returns else []
        self._moments = {name: RunningMoments() for name in (*steps, *returns)}

    @classmethod
    def from_config(
        cls,
        algorithm: AlgorithmConfig,
        *,
        updates_per_step: int = 1,
        max_lag: int | None = None,
        refuses_inert: bool = True,
    ) -> "Objective":
        """Raises ConfigError for parts that do not exist or contradict each other, and with `refuses_inert` for options without effect,
        naming field, value and way out. `max_lag`: bound on the age of tokens in policy versions; None: not known."""
        parts = Parts.from_config(algorithm)
        checks.refuse_contradictions(parts)
        if refuses_inert:
            refuse_inert(parts, updates_per_step=updates_per_step, max_lag=max_lag)
        return cls(parts, updates_per_step=updates_per_step)

    @classmethod
    def of_run(cls, config: RunConfig, *, keeps_inert: bool = False) -> "Objective":
        """The objective of a run, the same on its ranks and its driver. Raises as `from_config`. `keeps_inert` allows options without
        effect: preflight refuses them in a new run, and one that has begun keeps those that an earlier version accepted."""
        return cls.from_config(
            _weighted_as_parts(config),
            updates_per_step=config.learner.updates_per_step,
            max_lag=None if config.recorded is not None else config.buffer.max_off_policy_steps,
            refuses_inert=not keeps_inert,
        )

    def check_group_size(self, trajectories_per_group: int, *, num_candidates: int) -> None:
        """Raises ConfigError when the advantage cannot use groups of this size, or the selection so many candidates."""
        given = f"buffer.trajectories_per_group={trajectories_per_group}"
        checks.refuse_group_size(self._parts, trajectories_per_group=trajectories_per_group, given=given)
        checks.refuse_selection(
            self._parts, trajectories_per_group=trajectories_per_group, num_candidates=num_candidates
        )

    def check_parts(self, trajectories_per_group: int) -> None:
        """Raises ConfigError when a user's own part raises an error, or returns a value of another type or shape."""
        checks.refuse_failing_parts(self._parts, trajectories_per_group=trajectories_per_group)

    def check_rewards(self) -> None:
        """Raises ConfigError when the advantage cannot use rewards of 0 as the other parts change them."""
        checks.refuse_negative_rewards(self._parts)

    def check_recorded(self, *, smallest_group: int, is_sampler_known: bool) -> None:
        """Raises ConfigError when this algorithm cannot learn from these groups, recorded by another run or imported.

        `smallest_group`: the fewest known rewards of a group. `is_sampler_known`: the groups have log-probs of the policy that sampled.
        """
        given = f"a recorded group with {smallest_group} known reward{'' if smallest_group == 1 else 's'}"
        checks.refuse_group_size(self._parts, trajectories_per_group=smallest_group, given=given)
        if not is_sampler_known:
            checks.refuse_unknown_sampler(self._parts)

    @property
    def config(self) -> AlgorithmConfig:
        return self._parts.config

    @property
    def needs(self) -> frozenset[str]:
        """Tensors to supply besides policy and rollout log-probs:

        * "reference_logprobs": in the batch;
        * "reference_partition": in the batch, and the policy's of the same tokens to `loss`;
        * "proximal_logprobs": in the batch, from a pass at the start of the step;
        * "averaged_logprobs": in the batch as proximal log-probs, from a pass of the averaged policy at the start of the step;
        * "entropies": to `loss`, and with "proximal_logprobs" also in the batch, from the same pass;
        * "values": old ones in the batch, present ones to `loss`.
        """
        parts, config = self._parts, self._parts.config
        # With one update per step the present policy is π_old: only numbers fixed before the update need a pass for it.
        is_recomputed = config.proximal == "recompute"
        averages, fixed_before = config.clips_around_average, config.kl.reward is not None
        covariances_without_old = (
            parts.asks("covariances_BT", "batch_covariances_M") and config.proximal != "rollout" and not averages
        )
        needed = {
            "reference_logprobs": parts.learn_from_reference or config.monitor.reference_kl is not None,
            "reference_partition": config.distillation is not None,
            "proximal_logprobs": (is_recomputed and (self._updates_per_step > 1 or fixed_before))
            or parts.asks("entropies_NT", "proximal_logprobs_NT")
            or covariances_without_old,
            "averaged_logprobs": averages,
            "entropies": config.entropy_coefficient != 0 or parts.asks("entropies_NT", "entropies_BT"),
            "values": config.value is not None,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    def wants_entropies(self, policy_version: int) -> bool:
        """Whether every pass of a step computes entropies: the loss needs them, or the step measures them."""
        every_steps = self.config.monitor.entropy
        return "entropies" in self.needs or (every_steps is not None and policy_version % every_steps == 0)

    def wants_reference(self, step: int) -> bool:
        """Whether the reference scores the groups of a step (from 0): the loss needs it, or the step measures the KL to it."""
        every_steps = self.config.monitor.reference_kl
        return self._parts.learn_from_reference or (every_steps is not None and step % every_steps == 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the prompts whose numbers the batch must contain."""
        asking = [variant for variant in self._parts.all() if "columns" in variant.asks]
        return tuple(sorted({variant.parameters["column"] for variant in asking}))

    def chosen(self, summary: GroupSummary, *, group_size: int) -> list[int]:
        """Places of the trajectories that a judged, over-sampled group keeps; never those whose reward failed."""
        return group_rules.chosen(summary, group_size=group_size, parts=self._parts)

    def dropped_by(self, summary: GroupSummary) -> str | None:
        """Name of the filter that drops a judged group; None: it trains, unless a filter of the whole batch drops it.

        `prepare` drops the same groups, and raises DataError for one that only now a user's filter drops.
        """
        if not any(each.is_of_a_group for each in self._parts.filters):
            return None  # spares the driver tensors that no filter reads
        dropped_by = group_rules.dropped_by(group_rules.of_summary(summary), parts=self._parts)
        return dropped_by and dropped_by.plugin.name

    @torch.no_grad()
    def prepare(self, batch: BatchTensors) -> Prepared:
        """Computes all that depends on the whole batch. Raises DataError that names trajectory, group and field."""
        return prepare(
            batch,
            parts=self._parts,
            needs=self.needs,
            wants_entropies=self.wants_entropies(batch.current_version),
            kl_coefficients=self.kl_coefficients,
            moments=self._moments,
            earlier=self._earlier,
        )

    def adopt(self, prepared: Prepared) -> tuple[float, float]:
        """Adds the batch's rewards and returns to the objective's state, after old values were computed and before the step is learned.

        Returns factor and shift (x ↦ factor·x + shift) for the output of the critic's head, so that its values stay the same: (1, 0)
        without `value.normalise_returns`.
        """
        if self._earlier is not None:
            self._earlier = self._earlier.with_step(prepared.returns_by_prompt)
        before, after = self._moments.get("returns"), prepared.moments.get("returns")
        self._moments = dict(prepared.moments)
        if before is None or after is None:
            return 1.0, 0.0
        return before.std / after.std, (before.mean - after.mean) / after.std

    @torch.no_grad()
    def mini_batch(self, prepared: Prepared, rows: list[int], *, begins_step: bool) -> Prepared:
        """These trajectories of the step as one update, with weights and covariances of their own; all else is the step's."""
        return mini_batch(prepared, rows, parts=self._parts, begins_step=begins_step)

    def trains(self, update: Prepared, statistics: Statistics) -> bool:
        """Whether an update trains any token: filters and corrections may drop all of them. A critic, `kl.loss`, `kl.rollout`, entropy,
        distillation or the routers' loss trains all tokens of the kept trajectories.

        `statistics`: those of `loss`, over all rows of the update.
        """
        config = self.config
        terms = (config.kl.loss, config.kl.rollout, config.value, config.distillation)
        if any(terms) or config.entropy_coefficient or config.router_aux_loss_coefficient:
            return bool(update.loss_mask_NT.any())
        # Absent if filters left no token. Corrections may need the present policy, so only its passes know which tokens they drop.
        return statistics.compute().get("correction_dropped", 1.0) < 1.0

    @torch.no_grad()
    def statistics(self, prepared: Prepared) -> Statistics:
        """Statistics of the batch itself, which no update changes: count them once per step."""
        return of_the_batch(prepared)

    def loss(
        self,
        prepared: Prepared,
        *,
        policy_logprobs_BT: Tensor,
        entropies_BT: Tensor | None = None,
        values_BT: Tensor | None = None,
        policy_partition_BTP: Tensor | None = None,
    ) -> LossResult:
        """Loss of some rows of an update (`prepared.rows(...)`)."""
        assert policy_logprobs_BT.shape == prepared.loss_mask_NT.shape, (
            "log-probs are of these rows, as wide as the batch"
        )
        return loss(
            prepared,
            self._parts,
            policy_logprobs_BT=policy_logprobs_BT,
            entropies_BT=entropies_BT,
            values_BT=values_BT,
            policy_partition_BTP=policy_partition_BTP,
        )

    def imitation_loss(self, demonstrated_logprobs_C: Tensor, *, num_tokens: int) -> LossResult:
        """Loss of some of an update's demonstrations; `num_tokens` counts the tokens of all of them."""
        assert self.config.sft is not None, "only algorithm.sft has demonstrations"
        return imitation_loss(demonstrated_logprobs_C, self.config.sft, num_tokens=num_tokens)

    def observe(self, report: Mapping[str, float]) -> None:
        """Adapts the KL coefficients to the numbers of a step (`Statistics.compute()` of the whole step)."""
        measured = report.get("kl_reference_per_trajectory_mean")
        if measured is None:
            return
        for name, coefficient in self.kl_coefficients.items():
            adaptive: AdaptiveKlConfig | None = getattr(getattr(self.config.kl, name), "adaptive", None)
            if adaptive is not None:
                adapted = adapted_coefficient(
                    coefficient,
                    kl_per_trajectory=measured,
                    num_trajectories=int(report["trajectories"]),
                    target=adaptive.target,
                    horizon=adaptive.horizon,
                )
                self.kl_coefficients = self.kl_coefficients | {name: adapted}

    def state_dict(self) -> dict[str, Any]:
        return {
            "kl_coefficients": self.kl_coefficients,
            "moments": {name: asdict(each) for name, each in self._moments.items()},
            "earlier_returns": self._earlier and dict(self._earlier.by_prompt),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coefficients = {name: state["kl_coefficients"][name] for name in self.kl_coefficients}
        self._moments = {name: RunningMoments(**state["moments"][name]) for name in self._moments}
        if self._earlier is not None:
            self._earlier = replace(self._earlier, by_prompt=state["earlier_returns"])

    def formula(self) -> dict[str, Any]:
        """For the passport, as JSON: every formula as text with every parameter, defaults included."""
        return formula(self._parts)


def _weighted_as_parts(config: RunConfig) -> AlgorithmConfig:
    """Gives the weights of the reward's parts to shaping of a part, and to an advantage that weights components and has no weights of its
    own."""
    weights = {name: part.weight for name, part in config.reward.parts.items()}
    if config.has_episodes and (weights or config.judges_nothing):
        weights |= {"environment": config.reward.environment_weight, "earned": 1.0}
    shaping = [_weighted_as_its_part(step, i, weights) for i, step in enumerate(config.algorithm.reward_shaping)]
    algorithm = config.algorithm.model_copy(update={"reward_shaping": tuple(shaping)})
    advantage = algorithm.advantage
    if "component_weights" not in parameter_names(advantage.name, home=HOMES["advantage"]):
        return algorithm
    given = advantage.params.get("component_weights")
    if not weights:
        if config.has_episodes and given is None:
            raise ConfigError(
                f"advantage={advantage.name!r} reads the components of the reward, and reward.judge={config.reward.judge.name!r} beside an "
                "environment gives none; give the judge a name in reward.parts, or give component_weights"
            )
        return algorithm
    if isinstance(given, dict) and given.keys() != weights.keys():
        raise ConfigError(
            f"advantage.component_weights are of {', '.join(given)}, and the parts of the reward are {', '.join(weights)}; give a weight "
            "to each, or leave component_weights out: the weights are those of the reward"
        )
    params = advantage.params | {"component_weights": weights if given is None else given}
    return algorithm.model_copy(update={"advantage": advantage.model_copy(update={"params": params})})


def _weighted_as_its_part(step: Plugin, place: int, weights: Mapping[str, float]) -> Plugin:
    name, field = step.params.get("part"), f"reward_shaping[{place}]"
    if not isinstance(name, str) or "part_weight" not in parameter_names(step.name, home=HOMES["reward_shaping"]):
        return step
    if not weights.get(name):
        known = ", ".join(each for each, weight in weights.items() if weight) or "none"
        raise ConfigError(f"{field}.part={name!r} is no part with a weight; name one of reward.parts that has: {known}")
    if step.params.get("part_weight") is not None:
        raise ConfigError(f"{field}.part_weight is that of reward.parts.{name}, {weights[name]:g}; leave it out")
    return step.model_copy(update={"params": step.params | {"part_weight": weights[name]}})

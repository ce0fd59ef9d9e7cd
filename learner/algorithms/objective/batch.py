"""The batch of a step as padded tensors (`BatchTensors`), and the same with all numbers that depend on the whole batch (`Prepared`).

A mini-batch of a step of several updates is a `Prepared` too: `Objective.mini_batch` takes it out.

Shapes: N trajectories of the step, T the longest completion, K reward components, M all loss tokens, P parts of a partition of the
vocabulary: the tokens that the reference finds likeliest, and all others as one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from cluster.contracts.errors import DataError
from learner.algorithms.masks import masked
from learner.algorithms.moments import RunningMoments
from learner.algorithms.placing import placed
from learner.algorithms.registry.homes import OF_THE_BATCH

_OF_MODELS = (
    *("rollout_logprobs_NT", "reference_logprobs_NT", "proximal_logprobs_NT", "starting_logprobs_NT"),
    *("entropies_NT", "values_NT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """The whole batch of a step. Per-token tensors may hold anything where the loss mask is false, except `token_rewards_NT`."""

    loss_mask_NT: Tensor
    """bool; true for tokens that the policy sampled and that train. Nothing else decides which tokens count."""
    rollout_logprobs_NT: Tensor
    """Natural log, under the weights that sampled (μ)."""
    is_sampler_known: bool = True
    """False for text that no run's policy sampled: the policy at the start of the step then serves as μ."""
    policy_versions_NT: Tensor
    """int64; the policy version that sampled each token."""
    rewards_N: Tensor
    """float32 or float64; one per trajectory. Advantages are computed in its dtype."""
    group_index_N: Tensor
    """int64; trajectories of one prompt share it."""
    truncated_N: Tensor
    """bool; the completion was truncated."""
    completion_lengths_N: Tensor
    """int64; completion tokens, masked ones included."""
    trajectory_ids: list[str]
    group_ids: list[str]
    """One per trajectory, like trajectory_ids; for messages."""
    prompt_ids: list[str]
    """One per trajectory; groups of the same prompt share it."""
    current_version: int
    """The learner's policy version at the start of the step."""
    segment_index_NT: Tensor | None = None
    """int64; number of a token's segment in its episode, from 0; 0 after the completion. None: each trajectory is one segment."""
    prompt_lengths_N: Tensor | None = None
    """int64; tokens of the first segment's prompt, for statistics only."""
    reference_logprobs_NT: Tensor | None = None
    """NaN for a trajectory that the reference did not score: only allowed where the KL is monitored and not learned from. None: it scored
    none."""
    reference_partition_NTP: Tensor | None = None
    """The reference's log-probs of its likeliest tokens and, last, of all others together; None: not needed."""
    proximal_logprobs_NT: Tensor | None = None
    """Under π_old, as `algorithm.proximal` says; None: no extra forward pass."""
    starting_logprobs_NT: Tensor | None = None
    """Under the policy at the start of the step, which need not be π_old; None: the KL to it is not measured."""
    entropies_NT: Tensor | None = None
    """Of the policy at the start of the step; None: not needed."""
    values_NT: Tensor | None = None
    """The critic's, at the start of the step, as its head gives them; None: no critic."""
    token_rewards_NT: Tensor | None = None
    """Rewards per step or turn, on the token that earned them or on a masked token after it (an environment's answer), from which they
    move back; 0 elsewhere, padding included. A row adds up to its trajectory's reward. A row of NaN, or None for all rows: the trajectory's
    reward is placed as configured."""
    reward_components_NK: Tensor | None = None
    """NaN where a trajectory lacks a component; None: the reward has no components."""
    reward_component_names: tuple[str, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Numbers of the prompts, [N] by column name: the columns of `Objective.columns`."""

    @property
    def lags_NT(self) -> Tensor:
        """Off-policy steps of each token, 0 where the loss mask is false."""
        return torch.where(self.loss_mask_NT, self.current_version - self.policy_versions_NT, 0)

    def component(self, name: str) -> Tensor:
        """[N], NaN where a trajectory lacks it; in a step all may lack it."""
        if self.reward_components_NK is None or name not in self.reward_component_names:
            return torch.full_like(self.rewards_N, torch.nan)
        return self.reward_components_NK[:, self.reward_component_names.index(name)]

    def offered(self, **instead: Any) -> dict[str, Any]:
        """Tensors that variants may ask for, by name; `instead` replaces the batch's own. None: the run has no such tensor."""
        offered = {name: getattr(self, name, None) for name in OF_THE_BATCH}
        if self.segment_index_NT is None:
            # An expanded tensor takes the memory of one number.
            offered["segment_index_NT"] = self.policy_versions_NT.new_zeros(()).expand(self.policy_versions_NT.shape)
        return offered | instead

    def to(self, device: torch.device | str) -> Self:
        return self._each(lambda tensor: placed(tensor, device))

    def rows(self, rows: list[int]) -> Self:
        """These trajectories, in the given order."""
        index = placed(rows, self.rewards_N.device, dtype=torch.long)
        ids = {
            name: [getattr(self, name)[row] for row in rows] for name in ("trajectory_ids", "group_ids", "prompt_ids")
        }
        return replace(self._each(lambda tensor: tensor[index]), **ids)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        columns = {name: change(column) for name, column in self.columns.items()}
        return replace(self, columns=columns, **{name: change(tensor) for name, tensor in _tensors(self).items()})

    def validate(self, *, needs_reference: bool = False) -> None:
        """Raises DataError that names trajectory, group and field of the first invalid number."""
        num_trajectories, width = self.loss_mask_NT.shape
        assert self.loss_mask_NT.dtype == torch.bool
        assert len(self.trajectory_ids) == len(self.group_ids) == len(self.prompt_ids) == num_trajectories
        for name, tensor in _tensors(self).items():
            expected = (num_trajectories, width) if name.endswith(("_NT", "_NTP")) else (num_trajectories,)
            if tuple(tensor.shape[: len(expected)]) != expected:
                raise DataError(
                    f"{name} has shape {list(tensor.shape)}, but the loss mask makes it {list(expected)}: lengths do not match"
                )
        self._refuse("completion_lengths", self.completion_lengths_N < 1, "is zero: there is nothing to learn from")
        self._refuse("loss_mask", ~self.loss_mask_NT.any(1), "is false for every token: there is nothing to learn from")
        self._refuse("reward", ~torch.isfinite(self.rewards_N), "is not finite", self.rewards_N)
        if self.reward_components_NK is not None:
            self._refuse("reward_components", torch.isinf(self.reward_components_NK).any(1), "are not all finite")
        if self.token_rewards_NT is not None:
            earns_N = ~self.token_rewards_NT.isnan().all(1)
            is_bad_N = earns_N & ~torch.isfinite(self.token_rewards_NT).all(1)
            self._refuse("token_rewards", is_bad_N, "are not all finite")
            unearned_NT = (self.token_rewards_NT != 0) & (self.loss_mask_NT.cumsum(1) == 0)
            self._refuse(
                "token_rewards",
                unearned_NT.any(1) & earns_N,
                "stand before the first token that trains: no token has earned them",
            )
        for name, tensor_NT in self._of_models().items():
            may_miss = name == "reference_logprobs_NT" and not needs_reference
            bad_NT = (tensor_NT.isinf() if may_miss else ~tensor_NT.isfinite()) & self.loss_mask_NT
            self._refuse(name.removesuffix("_NT"), bad_NT.any(1), "is not finite at an unmasked token, or missing")

    def cleaned(self) -> Self:
        """The models' numbers per token in float64, 0 where masked."""
        found = self._of_models().items()
        return replace(self, **{name: masked(x_NT.double(), mask_BT=self.loss_mask_NT) for name, x_NT in found})

    def _of_models(self) -> dict[str, Tensor]:
        """Log-probs, entropies and values; masked entries are arbitrary."""
        return {name: tensor for name in _OF_MODELS if (tensor := getattr(self, name)) is not None}

    def name(self, row: int) -> str:
        """A trajectory's name in messages."""
        return f"trajectory {self.trajectory_ids[row]} of group {self.group_ids[row]}"

    def _refuse(self, field: str, is_bad_N: Tensor, problem: str, values_N: Tensor | None = None) -> None:
        if not bool(is_bad_N.any()):
            return
        row = int(is_bad_N.nonzero()[0])
        value = "" if values_N is None else f" ({values_N[row].item()})"
        more = int(is_bad_N.sum()) - 1
        raise DataError(f"{self.name(row)}: {field}{value} {problem}" + (f"; {more} more like it" if more else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The trajectories of one update, ready for micro-batching: all numbers that depend on the whole update or step are fixed.

    `rows` takes a micro-batch out of it.
    """

    batch: BatchTensors
    """The trajectories, filtered ones too. Numbers per token are float64 and 0 where masked. Values and returns are in the rewards' units.
    `token_rewards_NT` is each token's reward: shaped, placed, less the KL of `kl.reward` with credit `trajectory`."""
    shaped_rewards_N: Tensor
    loss_mask_NT: Tensor
    """The batch's, without the trajectories that filters took out."""
    gradient_mask_NT: Tensor
    """Tokens whose policy loss counts: the loss mask less tokens that filters took out."""
    denominator_mask_NT: Tensor
    """Tokens that the policy loss is divided by: the loss mask less tokens that filters took out of its denominator."""
    weights_NT: Tensor
    """The aggregation's weights over the update's trajectories: the loss is Σ w·l."""
    policy_weights_NT: Tensor
    """The same for the policy loss, where filters may remove tokens from the denominator."""
    value_weights_NT: Tensor | None
    advantages_NT: Tensor
    returns_NT: Tensor | None
    first_logprobs_NT: Tensor | None
    """Under the policy at the start of the step, from a pass before its updates; None: no such pass was made."""
    newest_lag: int
    """The fewest off-policy steps of any remaining token; 0 without tokens. The mismatch is measured on tokens of this lag."""
    correction_weights_NT: Tensor
    """Product of the corrections that do not depend on the present policy; 1 without any."""
    covariances_NT: Tensor | None
    batch_covariances_M: Tensor | None
    """Of all tokens of the update: `rows` leaves it whole."""
    is_kept_N: Tensor
    returns_by_prompt: Mapping[str, list[float]]
    """The rewards that the advantage saw, for `streaming`; empty without it."""
    moments: Mapping[str, RunningMoments]
    """This batch included; by the field of a reward shaping step, or `returns`. In this step the critic's head gives values normalised by
    those of `returns`; without them it gives values themselves."""
    wants_entropies: bool
    """The loss needs the entropies of the present policy, or this step measures them."""
    kl_coefficients: Mapping[str, float]
    """β of each term of `kl` in this step; adaptive controllers change it between steps."""
    begins_step: bool = True
    """True until the first update of the step is made: the present policy is the one at the start of the step."""

    def rows(self, rows: list[int]) -> "Prepared":
        """These trajectories, in the given order."""
        index = placed(rows, self.loss_mask_NT.device, dtype=torch.long)
        taken = {name: tensor[index] for name, tensor in _tensors(self).items() if not name.endswith("_M")}
        return replace(self, batch=self.batch.rows(rows), **taken)


def _tensors(item: BatchTensors | Prepared) -> dict[str, Tensor]:
    found = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}

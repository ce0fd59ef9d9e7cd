"""Batches for tests, in float64, with holes in the mask and garbage where it is false."""

from dataclasses import replace

import torch
from torch import Tensor, tensor

from learner.algorithms.objective import LossResult, Objective
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.statistics import Statistics


class Case:
    """A batch, and what the learner would compute of it."""

    def __init__(self, batch: BatchTensors, policy: Tensor, entropies: Tensor, values: Tensor) -> None:
        reference = batch.reference_logprobs_NT
        self.batch = replace(batch, reference_partition_NTP=None if reference is None else partition_of(reference))
        self.policy, self.entropies, self.values = policy, entropies, values

    def rows(self, order: list[int]) -> "Case":
        index = torch.tensor(order)
        tensors = {n: getattr(self.batch, n)[index] for n in _names(self.batch) if getattr(self.batch, n) is not None}
        ids = {n: [getattr(self.batch, n)[i] for i in order] for n in ("trajectory_ids", "group_ids", "prompt_ids")}
        columns = {n: column[index] for n, column in self.batch.columns.items()}
        batch = replace(self.batch, **tensors, **ids, columns=columns)
        return Case(batch, self.policy[index], self.entropies[index], self.values[index])

    def padded(self, *, left: int, right: int, garbage: float) -> "Case":
        def pad(x: Tensor) -> Tensor:
            fill = False if x.dtype == torch.bool else 0 if not x.is_floating_point() else garbage
            return torch.nn.functional.pad(x, (left, right), value=fill)

        tensors = {
            n: pad(getattr(self.batch, n))
            for n in _names(self.batch)
            if n.endswith("_NT") and getattr(self.batch, n) is not None
        }
        return Case(replace(self.batch, **tensors), pad(self.policy), pad(self.entropies), pad(self.values))

    def with_garbage(self, garbage: float) -> "Case":
        def spoil(x: Tensor) -> Tensor:
            return torch.where(self.batch.loss_mask_NT, x, garbage) if x.is_floating_point() else x

        tensors = {
            n: spoil(getattr(self.batch, n))
            for n in _names(self.batch)
            if n.endswith("_NT") and getattr(self.batch, n) is not None
        }
        return Case(replace(self.batch, **tensors), spoil(self.policy), spoil(self.entropies), spoil(self.values))

    def loss(
        self, objective: Objective, parts: list[list[int]] | None = None
    ) -> tuple[Tensor, dict[str, float], Tensor]:
        """Loss, reported statistics, and the gradient of the policy's log-probs of a step of one update; over micro-batches where given."""
        prepared = objective.prepare(self.batch)
        policy = self.policy.detach().clone().requires_grad_()
        chosen = parts or [list(range(len(policy)))]
        results = [self.of_rows(objective, prepared, policy, rows) for rows in chosen]
        total = torch.stack([result.loss for result in results]).sum()
        (gradient,) = torch.autograd.grad(total, policy)
        statistics = [objective.statistics(prepared), *(result.statistics for result in results)]
        return total.detach(), Statistics.merge(statistics).compute(), gradient

    def value_gradient(self, objective: Objective) -> Tensor:
        """Of the loss, by the critic's values."""
        values = self.values.detach().clone().requires_grad_()
        result = objective.loss(
            objective.prepare(self.batch),
            policy_logprobs_BT=self.policy,
            entropies_BT=self.entropies,
            values_BT=values,
            policy_partition_BTP=partition_of(self.policy),
        )
        return torch.autograd.grad(result.loss, values)[0]

    def of_rows(self, objective: Objective, prepared: Prepared, policy: Tensor, rows: list[int]) -> LossResult:
        return objective.loss(
            prepared.rows(rows),
            policy_logprobs_BT=policy[rows],
            entropies_BT=self.entropies[rows],
            values_BT=self.values[rows],
            policy_partition_BTP=partition_of(policy[rows]),
        )


def _names(batch: BatchTensors) -> list[str]:
    return [n for n in batch.__dataclass_fields__ if n.endswith(("_NT", "_N", "_NK"))]


def case(seed: int, *, num_groups: int = 3, group_size: int = 3, width: int = 6, spread: float = 0.3) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num = num_groups * group_size

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(2, width + 1, (num,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    hole = torch.randint(0, num, (1,), generator=generator)
    mask[hole, 0] = False
    rollout = -noise(num, width).abs() - 0.1
    batch = BatchTensors(
        loss_mask_NT=mask,
        rollout_logprobs_NT=rollout,
        policy_versions_NT=torch.randint(0, 3, (num, width), generator=generator),
        rewards_N=noise(num).round(decimals=1),
        group_index_N=torch.arange(num) // group_size,
        truncated_N=torch.zeros(num, dtype=torch.bool),
        completion_lengths_N=lengths,
        trajectory_ids=[f"t{i}" for i in range(num)],
        group_ids=[f"g{i // group_size}" for i in range(num)],
        prompt_ids=[f"p{i // group_size}" for i in range(num)],
        current_version=2,
        reference_logprobs_NT=rollout + spread * noise(num, width),
        proximal_logprobs_NT=rollout + spread * noise(num, width),
        entropies_NT=noise(num, width).abs(),
        values_NT=noise(num, width),
        reward_components_NK=noise(num, 2),
        reward_component_names=("format", "right"),
        columns={"difficulty": noise(num).abs()},
    )
    return Case(batch, rollout + spread * noise(num, width), noise(num, width).abs(), noise(num, width))


def partition_of(logprobs_NT: Tensor) -> Tensor:
    """A vocabulary of three, one token of it the likelier the likelier the sampled one is."""
    own_NT = logprobs_NT.nan_to_num()
    return torch.stack([own_NT, torch.zeros_like(own_NT), torch.full_like(own_NT, -1.0)], -1).log_softmax(-1)


def mixed(seed: int, *, single: bool = False, constant: bool = False, positive: bool = False) -> Case:
    """Groups of 7, one of equal rewards, one trajectory alone; two truncated, with holes, lags up to 4, far from the proximal policy."""
    whole = case(seed, num_groups=3, group_size=7, width=8, spread=0.8)
    batch = whole.batch
    rewards_N, components_NK = batch.rewards_N.float(), batch.reward_components_NK.float()
    rewards_N = rewards_N.abs() if positive else rewards_N
    rewards_N[: 21 if constant else 7], components_NK[:7, 0] = 0.3, 0.3
    groups_N, truncated_N, mask_NT = batch.group_index_N.clone(), batch.truncated_N.clone(), batch.loss_mask_NT.clone()
    groups_N[-1] += single
    truncated_N[[8, 15]] = True
    mask_NT[:, 2] &= ~mask_NT[:, 3]
    changed = replace(
        batch, rewards_N=rewards_N, reward_components_NK=components_NK, group_index_N=groups_N, truncated_N=truncated_N,
        loss_mask_NT=mask_NT, current_version=4,
    )  # fmt: skip
    return Case(changed, whole.policy, whole.entropies, whole.values)


def row(*values: float) -> Tensor:
    """One row of tokens, in float64."""
    return tensor([values], dtype=torch.float64)

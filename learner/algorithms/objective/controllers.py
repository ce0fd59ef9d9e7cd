"""State that moves from step to step: KL coefficients, running moments. All are values: observing a step gives the next one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import KlConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKl:
    """Formula: β never changes. Peers: all."""

    coefficient: float

    def observe(self, kl_per_trajectory: float, *, num_trajectories: int) -> "FixedKl":
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKl:
    """Formula: β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·n/horizon), n trajectories observed.

    Source: Ziegler et al., arXiv:1909.08593. Peers: LightRFT, OpenRLHF and verl `AdaptiveKLController`.
    """

    coefficient: float
    target: float = 6.0
    horizon: int = 10_000

    def observe(self, kl_per_trajectory: float, *, num_trajectories: int) -> "AdaptiveKl":
        error = min(max(kl_per_trajectory / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * num_trajectories / self.horizon))


def controllers(config: KlConfig) -> dict[str, FixedKl | AdaptiveKl]:
    """One per term that the run has, by the term's name."""
    found: dict[str, FixedKl | AdaptiveKl] = {}
    for name in KlConfig.model_fields:
        term = getattr(config, name)
        adaptive = getattr(term, "adaptive", None)
        if adaptive is not None:
            found[name] = AdaptiveKl(coefficient=term.coefficient, target=adaptive.target, horizon=adaptive.horizon)
        elif term is not None:
            found[name] = FixedKl(coefficient=term.coefficient)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Mean and spread of all rewards or returns so far, for scaling them by a slowly moving number.

    Formula: Chan et al.'s parallel update of mean and M2; std with ddof 1. Peers: LightRFT and TRL `RunningMoments`.
    Degenerate: the std of equal values, and of a single one, is 1: they are not scaled
    """

    mean: float = 0.0
    std: float = 1.0
    var: float = 1.0
    """With ddof 0."""
    count: float = 1e-24

    def update(self, values_N: Tensor) -> "tuple[RunningMoments, float, float]":
        """The moments with these values in them, and the values' own mean and std (0 for a single one)."""
        num = values_N.numel()
        var, mean = (moment.item() for moment in torch.var_mean(values_N.double(), correction=0))
        total = self.count + num
        delta = mean - self.mean
        squares = var * num + self.var * self.count + delta**2 * self.count * num / total
        mean_of_all, std_of_all = self.mean + delta * num / total, 1.0
        # The variance of equal values is what rounding, and the count at the start, leave of it.
        if squares > total * (1e-20 + (1e-7 * mean_of_all) ** 2):
            std_of_all = (squares / (total - 1)) ** 0.5
        merged = RunningMoments(mean=mean_of_all, std=std_of_all, var=squares / total, count=total)
        return merged, mean, (var * num / (num - 1)) ** 0.5 if num > 1 else 0.0

    def normalise(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def restore(self, normalised: Tensor) -> Tensor:
        """What `normalise` was given."""
        return normalised * self.std + self.mean

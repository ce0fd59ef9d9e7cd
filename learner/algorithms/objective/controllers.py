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
    """Mean and spread of all rewards or returns so far, to scale them by a slowly moving number.

    Formula: Chan et al.'s parallel update of mean and variance; std with ddof 1. Peers: LightRFT and TRL `RunningMoments`.
    Degenerate: the std of equal values, and of a single one, is 1: they are not scaled
    """

    mean: float = 0.0
    var: float = 0.0
    """With ddof 0."""
    count: int = 0

    @property
    def std(self) -> float:
        # Below this the variance is what rounding leaves of equal values.
        if self.var <= (1e-7 * self.mean) ** 2:
            return 1.0
        return (self.var * self.count / (self.count - 1)) ** 0.5

    def update(self, values: Tensor) -> "RunningMoments":
        """With these values in them, in whatever order they came."""
        ordered_M = values.flatten().double().sort().values
        var, mean = (moment.item() for moment in torch.var_mean(ordered_M, correction=0))
        num, total = len(ordered_M), self.count + len(ordered_M)
        delta = mean - self.mean
        squares = var * num + self.var * self.count + delta**2 * self.count * num / total
        return RunningMoments(mean=self.mean + delta * num / total, var=squares / total, count=total)

    def normalise(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def restore(self, normalised: Tensor) -> Tensor:
        """What `normalise` was given."""
        return normalised * self.std + self.mean

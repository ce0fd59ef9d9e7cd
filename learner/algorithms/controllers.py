"""KL coefficients over steps. Controllers are values: observing a step gives the next one, and a checkpoint keeps its number."""

from dataclasses import dataclass, replace


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

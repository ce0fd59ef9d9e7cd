"""State that moves from step to step: KL coefficients, running moments. All are values: observing a step gives the next one."""

from dataclasses import dataclass, replace

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

"""Controllers of KL coefficients. Immutable: `observe` returns the controller of the next step."""

from dataclasses import dataclass, replace

from cluster.contracts.algorithm_config import AdaptiveKlConfig, KlConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """Formula: β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·min(n/horizon, 1)), n trajectories observed. Without `adaptive` β is constant.

    Source: Ziegler et al., arXiv:1909.08593. Peers: LightRFT, OpenRLHF and verl `AdaptiveKLController`, `FixedKLController`.
    """

    coefficient: float
    adaptive: AdaptiveKlConfig | None = None

    def observe(self, kl_per_trajectory: float, *, num_trajectories: int) -> "KlController":
        if self.adaptive is None:
            return self
        error = min(max(kl_per_trajectory / self.adaptive.target - 1, -0.2), 0.2)
        # Above five horizons β would become negative, and the run would reward KL.
        num_counted = min(num_trajectories, self.adaptive.horizon)
        return replace(self, coefficient=self.coefficient * (1 + error * num_counted / self.adaptive.horizon))


def controllers(config: KlConfig) -> dict[str, KlController]:
    """One for each term of `kl` that the run has, by its name."""
    terms = {name: getattr(config, name) for name in KlConfig.model_fields}
    return {
        name: KlController(coefficient=term.coefficient, adaptive=getattr(term, "adaptive", None))
        for name, term in terms.items()
        if term is not None
    }

"""Mean and spread of a stream of numbers. Immutable: `update` returns new moments."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.contracts.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Mean and spread of all rewards or returns so far, which change slowly.

    Formula: Chan et al.'s parallel update of mean and variance; std with ddof 1. Peers: LightRFT and TRL `RunningMoments`.
    Degenerate: the std of values that are equal up to rounding, and of a single one, is 1: they are not scaled
    """

    mean: float = 0.0
    var: float = 0.0
    """With ddof 0."""
    count: int = 0

    @property
    def std(self) -> float:
        # A smaller variance is rounding error of equal values, or of the critic's values in returns that are all 0.
        if self.var <= max((1e-7 * self.mean) ** 2, 1e-24):
            return 1.0
        return (self.var * self.count / (self.count - 1)) ** 0.5

    def update(self, values: Tensor) -> "RunningMoments":
        """The moments with these values included; their order does not matter. Raises DataError for values whose squares overflow."""
        if not values.numel():
            return self
        ordered_M = values.flatten().double().sort().values
        var, mean = (moment.item() for moment in torch.var_mean(ordered_M, correction=0))
        num, total = len(ordered_M), self.count + len(ordered_M)
        delta = mean - self.mean
        squares = var * num + self.var * self.count + delta * delta * self.count * num / total
        if not math.isfinite(squares) and bool(ordered_M.isfinite().all()):
            largest = ordered_M.abs().max().item()
            raise DataError(
                f"values up to {largest:g} have no spread that a number can hold; give smaller rewards, or put reward_clip before this "
                "step of algorithm.reward_shaping"
            )
        return RunningMoments(mean=self.mean + delta * num / total, var=squares / total, count=total)

    def normalise(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def restore(self, normalised: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        return normalised * self.std + self.mean

"""An exponential moving average of the policy's weights: PPO-EWMA's proximal policy (Hilton, Cobbe and Schulman, arXiv:2110.00641)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.distributed import local


class WeightAverage:
    """The average of trained weights, by name, in float32; sharded like them.

    Formula: w ← 1 + decay·w, then θ̄ ← θ̄ + (θ − θ̄)/w, from θ̄ = θ and w = 1: the mean of all θ so far, weighted 1, decay, decay², ...
        from the newest back, without a bias towards the first; `total` is w, the sum of these weights
    Degenerate: with a decay of 0 it is θ, to the bit; where θ does not move it stays, to the bit
    Peers: openai/ppo-ewma, whose clip centre moves with every update; here a step clips around the average at its start
    """

    def __init__(self, weights: Mapping[str, Tensor], *, decay: float) -> None:
        self._weights, self._decay = weights, decay
        self.averages = {name: weight.detach().clone() for name, weight in weights.items()}
        self.total = 1.0

    @torch.no_grad()
    def update(self) -> None:
        """Adds the present weights to the average. Call it after each update of them."""
        self.total = 1 + self._decay * self.total
        for name, average in self.averages.items():
            local(average).lerp_(local(self._weights[name].detach()), 1 / self.total)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps weights and averages; a second call undoes it exactly. Needs extra memory for one tensor."""
        for name, average in self.averages.items():
            weight = local(self._weights[name].detach())
            own = weight.clone()
            weight.copy_(local(average))
            local(average).copy_(own)

"""Groups across tickets: a prompt's newest returns of earlier steps join those of its trajectories in this step.

A group trains as soon as it arrives, and is compared with its prompt's earlier returns. It does not wait until the prompt is sampled again:
the bound on staleness would not allow that. Earlier trajectories only serve as a baseline; none is learned twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from cluster.contracts.algorithm_config import StreamingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierReturns:
    """Each prompt's returns of earlier steps, as the advantage saw them. Immutable: `with_step` returns the next value.

    Peers: torchrl MCAdvantage by the return of a trajectory (its default compares the rewards of steps: the same if each trajectory
    has one). It keeps trajectories until their group is full, then trains on all; the trajectory that fills the group has the same
    advantage here. Its version of 2025 has a sliding window.
    """

    config: StreamingConfig
    by_prompt: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """The newest last."""

    def joined(self, own_G: Tensor, *, prompt_id: str) -> Tensor:
        """The step's returns of a prompt, then as many of the newest earlier ones as the group needs to be full."""
        num_missing = max(self.config.group_size - len(own_G), 0)
        earlier = list(self.by_prompt.get(prompt_id, ()))
        return own_G.new_tensor([*own_G.tolist(), *earlier[max(len(earlier) - num_missing, 0) :]])

    def with_step(self, returns: Mapping[str, Sequence[float]]) -> Self:
        """The same with a step's returns added, by prompt in the order of its trajectories."""
        merged = {name: [*self.by_prompt.get(name, ()), *values] for name, values in returns.items()}
        size, clears = self.config.group_size, self.config.when_full == "clear"
        kept = {name: [] if clears and len(values) >= size else values[1 - size :] for name, values in merged.items()}
        return replace(self, by_prompt={**self.by_prompt, **kept})

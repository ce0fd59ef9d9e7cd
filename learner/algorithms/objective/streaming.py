"""Groups across tickets: a prompt's newest returns of earlier steps join those of its trajectories in this step.

A group trains as soon as it comes, and is compared with what its prompt earned before: nothing waits for a prompt to be met again, which
the bound on staleness would not allow. So the earlier trajectories are a baseline, and are not learned from a second time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from cluster.contracts.algorithm_config import StreamingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierReturns:
    """What each prompt's trajectories earned in earlier steps, as the advantage saw it. A value: a step gives the next one.

    Peers: torchrl MCAdvantage by the return of a trajectory (its default compares the rewards of steps: the same where each trajectory
    has one). It keeps trajectories until their group is full and then trains on all: the one that fills it has the same advantage
    here. Its version of 2025 slides.
    """

    config: StreamingConfig
    by_prompt: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """The newest at the end."""

    def joined(self, own_G: Tensor, *, prompt_id: str) -> Tensor:
        """The step's returns of a prompt, and behind them the newest earlier ones that make the group full."""
        num_missing = max(self.config.group_size - len(own_G), 0)
        earlier = list(self.by_prompt.get(prompt_id, ()))
        return own_G.new_tensor([*own_G.tolist(), *earlier[max(len(earlier) - num_missing, 0) :]])

    def with_step(self, returns: Mapping[str, Sequence[float]]) -> Self:
        """With a step's returns, by prompt in the order of its trajectories."""
        merged = {name: [*self.by_prompt.get(name, ()), *values] for name, values in returns.items()}
        size, clears = self.config.group_size, self.config.when_full == "clear"
        kept = {name: [] if clears and len(values) >= size else values[1 - size :] for name, values in merged.items()}
        return replace(self, by_prompt={**self.by_prompt, **kept})

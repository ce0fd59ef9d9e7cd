"""Which prompt a group gets: a pure function of its place in the run's start order, so a run resumes anywhere without a cursor."""

import random
from dataclasses import dataclass, field

from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt, SamplingParams, Ticket, sample_seed


@dataclass(slots=True, kw_only=True)
class TicketOffice:
    """Tickets by index. Every epoch is a permutation of the source, seeded by run seed and epoch."""

    source: PromptSource
    seed: int
    trajectories_per_group: int
    extra_trajectories: int = 0
    sampling: SamplingParams
    _epoch: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list[int], init=False)

    def ticket(self, index: int, *, policy_version: int) -> Ticket:
        return Ticket(
            index=index,
            prompt=self.prompt(index),
            num_trajectories=self.trajectories_per_group,
            num_extra_trajectories=self.extra_trajectories,
            seed=sample_seed(self.seed, index),
            policy_version=policy_version,
            sampling=self.sampling,
        )

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.source))
        if epoch != self._epoch:
            self._order = list(range(len(self.source)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self.source[self._order[place]]


def evaluation_tickets(
    source: PromptSource,
    *,
    num_prompts: int,
    num_samples: int,
    seed: int,
    sampling: SamplingParams,
    policy_version: int,
) -> list[Ticket]:
    """The first prompts of a held-out source, the same at every evaluation. Their indices are negative: they are never trained on."""
    return [
        Ticket(
            index=-1 - place,
            prompt=source[place],
            num_trajectories=num_samples,
            seed=sample_seed(seed, place),
            policy_version=policy_version,
            sampling=sampling,
        )
        for place in range(min(num_prompts, len(source)))
    ]

"""The prompt of a group: a pure function of its place in the start order, so that a run resumes anywhere without a cursor."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import chain

from cluster.contracts.errors import DataError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Ticket, sample_seed
from cluster.rollouts.mixture import Mixture, place
from cluster.rollouts.pass_rates import PassRates

Fit = Callable[[Prompt], Prompt | None]
"""Returns the prompt to sample, perhaps shortened; None: it does not fit, and another one takes its place."""

_KEPT_EPOCHS = 2
"""Orders that are kept for each source: around the end of an epoch, prompts of two epochs are needed in turn."""
_MAX_DRAWS = 1000
"""Prompts that are tried for one place."""


class TicketOffice:
    """Tickets by index. Sources share the indices by weight; every epoch of a source is a permutation, seeded by run seed and epoch.

    A prompt that does not fit, or is not worth sampling now, gives its place to another one of its source, drawn by run seed and index. So
    no place depends on another, and each source keeps its share.

    A thread makes the prompts, `num_ahead` of them in advance, so that a slow source does not stop the driver's event loop.
    """

    def __init__(
        self,
        *,
        source: Mixture,
        seed: int,
        trajectories_per_group: int,
        extra_trajectories: int = 0,
        sampling: SamplingConfig,
        num_ahead: int = 0,
        fit: Fit | None = None,
        pass_rates: PassRates | None = None,
        thread: Executor | None = None,
    ) -> None:
        """`fit` None: every prompt fits. `pass_rates` None: every prompt is worth sampling. With pass rates no prompt is made ahead,
        because the rates known by then decide which one it is. `thread` makes the prompts; None: a thread of the office's own."""
        self.source = source
        self._seed = seed
        self._trajectories_per_group = trajectories_per_group
        self._extra_trajectories = extra_trajectories
        self._sampling = sampling
        self._num_ahead = 0 if pass_rates else num_ahead
        self.pass_rates = pass_rates
        self._fit: Fit = fit or (lambda prompt: prompt)
        self._unfit = set[tuple[int, int]]()
        self._ids: dict[tuple[int, int], str] = {}
        """Ids of the prompts that fit, so that one that is not wanted is not made again."""
        self._counts = Counter[str]()
        self._order = lru_cache(maxsize=_KEPT_EPOCHS * len(source.sources))(self._shuffled)
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._ahead: dict[int, Future[Prompt]] = {}
        self._ahead_end = 0
        """Index after the last prompt that was made ahead."""

    async def tickets(self, indices: Iterable[int], *, policy_version: int) -> list[Ticket]:
        """The groups' tickets, in the order given. Errors of the source pass through."""
        wanted = list(indices)
        making = [self._ahead.pop(index, None) or self._thread.submit(self.prompt, index) for index in wanted]
        self._make_ahead(max(wanted, default=-1) + 1)
        prompts = [each.result() if each.done() else await asyncio.wrap_future(each) for each in making]
        return [self._ticket(*each, policy_version=policy_version) for each in zip(wanted, prompts, strict=True)]

    def made_ahead(self, indices: Sequence[int], *, policy_version: int) -> list[Ticket] | None:
        """As `tickets`, if all prompts are made; else None. A task to wait for them would cost more than a group's way to its worker."""
        if not all(index in self._ahead and self._ahead[index].done() for index in indices):
            return None
        prompts = [self._ahead.pop(index).result() for index in indices]
        self._make_ahead(max(indices, default=-1) + 1)
        return [self._ticket(*each, policy_version=policy_version) for each in zip(indices, prompts, strict=True)]

    def prompt(self, index: int) -> Prompt:
        """The prompt of group `index`. Raises DataError if no prompt of its source fits."""
        number, turn = place(index, self.source.weights)
        size = len(self.source.sources[number].rows)
        epoch, position = divmod(turn, size)
        order, rates = self._order(number, epoch), self.pass_rates
        draws = random.Random(f"{self._seed}/instead/{index}")

        def is_wanted(prompt_id: str) -> bool:
            return rates is None or rates.wants(prompt_id, index=index, drawn=draws.random())

        row, resting = order[position], list[int]()
        for _ in range(_MAX_DRAWS):
            known = self._ids.get((number, row))
            prompt = self._fitting(number, row) if known is None or is_wanted(known) else None
            if prompt and (known is not None or is_wanted(prompt.prompt_id)):
                self._counts.update("skipped" for other in resting if other != row)
                return prompt
            if prompt or known is not None:
                resting.append(row)
            else:
                self._counts["dropped"] += 1
            row = draws.randrange(size)
        # Draws can miss the few prompts that fit and do not rest.
        walk = [order[(position + step) % size] for step in range(size)]
        awake = (row for row in walk if not self._rests(number, row, index))
        if prompt := next(filter(None, (self._fitting(number, row) for row in chain(awake, resting[:1], walk))), None):
            return prompt
        source = self.source.sources[number].name or "the source"
        raise DataError(f"none of the {size:,} prompts of {source} fits prompts.max_prompt_tokens; raise it")

    def _rests(self, number: int, position: int, index: int) -> bool:
        if self.pass_rates is None:
            return False
        if (number, position) not in self._ids:
            self._fitting(number, position)  # makes its id known, if it fits
        known = self._ids.get((number, position))
        return known is not None and self.pass_rates.rests(known, index=index)

    def _fitting(self, number: int, position: int) -> Prompt | None:
        if (number, position) in self._unfit:
            return None
        prompt = self.source.prompt(number, position)
        fitted = self._fit(prompt)
        if fitted is None:
            self._unfit.add((number, position))
            return None
        if self.pass_rates:
            self._ids[number, position] = fitted.prompt_id
        if fitted is not prompt:
            self._counts["truncated"] += 1
        return fitted

    def drain_stats(self) -> dict[str, float]:
        """Prompts that did not fit or were skipped, since the last call."""
        counts, self._counts = self._counts, Counter[str]()
        return {f"prompts/num_{event}": float(number) for event, number in counts.items()}

    def close(self) -> None:
        """Ends the thread, and cancels prompts that are not made yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ticket(self, index: int, prompt: Prompt, *, policy_version: int) -> Ticket:
        return Ticket(
            index=index,
            prompt=prompt,
            num_trajectories=self._trajectories_per_group,
            num_extra_trajectories=self._extra_trajectories,
            seed=sample_seed(self._seed, index),
            policy_version=policy_version,
            sampling=self._sampling,
        )

    def _make_ahead(self, next_index: int) -> None:
        """Groups start in order, so an index that is asked for again, after a death, makes nothing ahead.

        Many at a time: waking the thread for every group would cost the driver more than making its prompt.
        """
        end = next_index + self._num_ahead
        if next_index + self._num_ahead // 2 < self._ahead_end:
            return
        for index in range(max(next_index, self._ahead_end), end):
            self._ahead[index] = self._thread.submit(self.prompt, index)
        self._ahead_end = max(self._ahead_end, end)

    def _shuffled(self, number: int, epoch: int) -> list[int]:
        source = self.source.sources[number]
        return epoch_order(
            len(source.rows), seed=self._seed if source.name is None else f"{self._seed}/{source.name}", epoch=epoch
        )


def epoch_order(size: int, *, seed: int | str, epoch: int) -> list[int]:
    """A permutation of [0, size), the same wherever it is made."""
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order

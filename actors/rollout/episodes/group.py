"""A group of episodes between its ticket and its batch."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from actors.environments.host.hosting import EnvironmentHost
from actors.rollout.engine_thread import EngineThread
from actors.rollout.episodes.lockstep import Place
from actors.rollout.episodes.play import EngineRefusalError, Play
from actors.rollout.episodes.speech import Opening, Speech
from actors.rollout.episodes.turns import TurnSampler
from actors.rollout.group import columns_of
from actors.rollout.inbox import Inbox
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import EpisodeEnd
from cluster.contracts.errors import DataError
from cluster.contracts.types import Completion, RewardStatus, Ticket


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayEnded:
    """The event of an episode's end, for the call of its group."""

    group: "EpisodeGroup"
    play: Play
    outcome: EpisodeEnd | DataError
    """DataError: the engine refuses the prompt, or the prompt ends its environment's process."""


class EpisodeGroup:
    """The episodes of one ticket, all of one task in one environment."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        environment: str,
        key: str,
        speech: Speech,
        host: EnvironmentHost,
        config: EpisodesConfig,
    ) -> None:
        """`key` as for `GroupInProgress`. Raises DataError for a prompt that is too long, that the template refuses, or that has a column
        which is no valid sampling setting."""
        opening = Opening(ticket.prompt, speech)
        opening.begin()
        self.ticket = ticket
        self.key = key
        self.environment = environment
        self._host = host
        num_started = ticket.num_trajectories + ticket.num_extra_trajectories
        self._plays = [
            Play(ticket, index, key=key, opening=opening, speech=speech, config=config) for index in range(num_started)
        ]
        self._ended: dict[int, EpisodeEnd] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_finished(self) -> bool:
        """Surplus episodes replace failed ones, as long as there are any."""
        num_good = sum(end.status is RewardStatus.OK for end in self._ended.values())
        return num_good == self.ticket.num_trajectories or len(self._ended) == len(self._plays)

    def start(self, sampler: TurnSampler, inbox: Inbox, places: Iterator[Place]) -> None:
        """Starts all episodes, each at the next of `places`; `inbox` gets their ends."""
        for play in self._plays:
            place = next(places)
            play.sample = partial(sampler.sample, place)
            self._tasks.append(asyncio.create_task(self._run(play, sampler, inbox, place=place)))

    def add(self, play: Play, end: EpisodeEnd) -> None:
        """The group is not finished: later episodes are surplus."""
        self._ended[play.index] = play.ended(end)

    def stop(self, engine: EngineThread) -> None:
        """Cancels the episodes that have not ended. They clean up in the background."""
        for task in self._tasks:
            task.cancel()
            _cleaning_up.add(task)
            task.add_done_callback(_cleaning_up.discard)

    def unfinished(self) -> list[str]:
        """Empty: an episode cannot continue on another worker, since its environment's state is part of it."""
        return []

    def sampled(self, kept: Mapping[str, Completion]) -> pa.RecordBatch | None:
        """None: another worker begins the episodes anew."""
        return None

    def rows(self, *, run_id: str, worker: str) -> list[dict[str, Any]]:
        """One row per segment, in the order of the episodes."""
        common = columns_of(self.ticket, run_id=run_id, environment=self.environment, worker=worker)
        good = [index for index, end in self._ended.items() if end.status is RewardStatus.OK]
        failed = [index for index in self._ended if index not in good]
        chosen = sorted([*good, *failed][: self.ticket.num_trajectories])
        of_each = [self._plays[index].rows(self._ended[index], common) for index in chosen]
        self._plays.clear()  # a call keeps its groups until it ends
        _fill_earned(of_each)
        return [row for rows in of_each for row in rows]

    async def _run(self, play: Play, sampler: TurnSampler, inbox: Inbox, *, place: Place) -> None:
        try:
            outcome = await self._outcome(play, sampler, place=place)
        except Exception as error:  # noqa: BLE001  the call raises it
            inbox.put(error)
        else:
            inbox.put(("", PlayEnded(group=self, play=play, outcome=outcome)))

    async def _outcome(self, play: Play, sampler: TurnSampler, *, place: Place) -> EpisodeEnd | DataError:
        """An episode whose process died begins anew, first together with others, since one of them may be the cause, then in a process of
        its own."""
        prompt_id = self.ticket.prompt.prompt_id
        try:
            end = await self._played(play, sampler, place=place, alone=False)
            for alone in (False, True):
                if not _died(end):
                    return end
                play.begin()
                end = await self._played(play, sampler, place=place, alone=alone)
        except EngineRefusalError as error:
            return DataError(f"the engine refuses prompt {prompt_id!r}: {error}")
        if not _died(end):
            return end
        return DataError(f"prompt {prompt_id!r} ends the process of its environment, alone in it, too: {end.message}")

    async def _played(self, play: Play, sampler: TurnSampler, *, place: Place, alone: bool) -> EpisodeEnd:
        async with self._host.alone if alone else contextlib.nullcontext():
            await sampler.pace.enter(place)
            try:
                return await self._host.run(play.task, play.converse, alone=alone)
            finally:
                sampler.pace.leave(place)


_cleaning_up: set[asyncio.Task[None]] = set()


def _died(end: EpisodeEnd) -> bool:
    """Whether the episode's process died. Its own deadline does not count: that is an ordinary failure."""
    return end.is_suspect and end.status is RewardStatus.ERROR


def _fill_earned(of_each: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Adds each reward that another episode of the group earned, as 0, to the episodes that did not earn it and did not fail."""
    living = [row for rows in of_each for row in rows if row["reward_status"] in (None, RewardStatus.OK)]
    names = sorted({name for row in living for name, _ in row["reward_components"] if name.startswith("earned/")})
    for row in living:
        row["reward_components"] = [*(dict.fromkeys(names, 0.0) | dict(row["reward_components"])).items()]

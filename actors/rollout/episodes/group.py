"""A group of episodes between its ticket and its batch."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
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
    """News of one episode, for the call that its group is of."""

    group: "EpisodeGroup"
    play: Play
    outcome: EpisodeEnd | DataError
    """DataError: the prompt is refused."""


class EpisodeGroup:
    """One environment's, all of one task."""

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
        """`key` as for a `GroupInProgress`. Raises DataError for a prompt that does not fit or does not go through the template, or with a
        column that cannot be its sampling."""
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
        """Surplus episodes take the places of failed ones, as long as there are any."""
        num_good = sum(end.status is RewardStatus.OK for end in self._ended.values())
        return num_good == self.ticket.num_trajectories or len(self._ended) == len(self._plays)

    def start(self, sampler: TurnSampler, inbox: Inbox, *, call: int, first_place: int) -> int:
        """All episodes begin, and tell `inbox` of their ends. Their places in the order of all are counted from `first_place`; the next
        free one is returned."""
        for number, play in enumerate(self._plays, first_place):
            place = call, number
            play.sample = partial(sampler.sample, place)
            self._tasks.append(asyncio.create_task(self._run(play, sampler, inbox, place=place)))
        return first_place + len(self._plays)

    def add(self, play: Play, end: EpisodeEnd) -> None:
        """As `GroupInProgress.add`."""
        if not self.is_finished:
            self._ended[play.index] = play.ended(end)

    def stop(self, engine: EngineThread) -> None:
        """Cancels the episodes that have not ended; they clean up beside what comes next."""
        for task in self._tasks:
            task.cancel()
            _cleaning_up.add(task)
            task.add_done_callback(_cleaning_up.discard)

    def unfinished(self) -> list[str]:
        """No request can go on elsewhere: an episode is what its environment knows, too."""
        return []

    def sampled(self, kept: Mapping[str, Completion]) -> pa.RecordBatch | None:
        """Another worker begins anew."""
        return None

    def rows(self, *, run_id: str, worker: str) -> list[dict[str, Any]]:
        """One a segment, in the order of the episodes."""
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
        except Exception as error:  # noqa: BLE001  it goes on in the call
            inbox.put(error)
        else:
            inbox.put(("", PlayEnded(group=self, play=play, outcome=outcome)))

    async def _outcome(self, play: Play, sampler: TurnSampler, *, place: Place) -> EpisodeEnd | DataError:
        """One whose process died begins anew beside the others, for it may have been one of them; then in a process to itself."""
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
    """Not by its own deadline: that is a failure like others."""
    return end.is_suspect and end.status is RewardStatus.ERROR


def _fill_earned(of_each: Sequence[Sequence[dict[str, Any]]]) -> None:
    """An episode that did not earn what others of the group did has 0 of it, unless it failed."""
    living = [row for rows in of_each for row in rows if row["reward_status"] in (None, RewardStatus.OK)]
    names = sorted({name for row in living for name, _ in row["reward_components"] if name.startswith("earned/")})
    for row in living:
        row["reward_components"] = [*(dict.fromkeys(names, 0.0) | dict(row["reward_components"])).items()]

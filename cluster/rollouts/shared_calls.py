"""Calls of a reward service. Groups that come during a call go together in the next one, and an answer brings all that are ready.

A call costs driver and actor milliseconds, and a group in it a fraction of that.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.contracts.errors import LostError, TreadwheelError
from cluster.contracts.types import Group, Scores
from cluster.remote.actor import RemoteActor, describe
from cluster.remote.failures import answer_of
from cluster.rollouts.judge_servers import JudgeServers

_STAGE = "score_several"
_MOST_TOGETHER = 16
"""Most groups of one call: all wait until the last one's trajectories are on the actor's node."""

Columns = tuple[Any, Mapping[str, Any]]
"""A group's columns, small enough to travel by value, and their values for its summary."""


class SharedCalls:
    """Sends groups to one reward service, one call after another."""

    def __init__(
        self,
        actor: RemoteActor,
        *,
        tasks: asyncio.TaskGroup,
        deadline_s: float,
        give_up: Callable[[TreadwheelError], None],
        servers: JudgeServers | None = None,
    ) -> None:
        """`deadline_s` bounds each group's wait for its columns. The actor is told new addresses of the `servers`; `give_up` gets the error
        if it cannot be."""
        self._actor = actor
        self._give_up = give_up
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._numbers = itertools.count()
        self._new: dict[int, tuple[Group, Sequence[Scores]]] = {}
        """Groups that no call has sent yet."""
        self._answers: dict[int, asyncio.Future[Columns | None]] = {}
        self._is_calling = False
        self._servers = servers
        self._known_servers: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """Groups that wait for their columns."""
        return len(self._answers)

    async def score(self, group: Group, scores: Sequence[Scores]) -> Columns | None:
        """None if the actor failed before the group was sent. Raises the error that ended the group's judging, or the actor's."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._new[number] = group, scores
        if not self._is_calling:
            self._is_calling = True
            self._tasks.create_task(self._call())
        try:
            return await answer_of(
                answer,
                actor=self._actor.name,
                stage=_STAGE,
                deadline_s=self._deadline_s,
                when_late=self._describe,
            )
        finally:
            self._new.pop(number, None)
            self._answers.pop(number, None)

    async def _describe(self) -> str:
        return describe("it", self._actor.last_progress)

    async def _call(self) -> None:
        await asyncio.sleep(0)  # those that come at the same time go together
        while self._answers:
            try:
                await self._tell_servers()
                await self._send([*itertools.islice(self._new, _MOST_TOGETHER)])
            except TreadwheelError as error:
                for number in list(self._answers):
                    self._set(number, None if number in self._new else error)
        self._is_calling = False

    async def _tell_servers(self) -> None:
        servers = self._servers.urls() if self._servers else {}
        if servers == self._known_servers:
            return
        try:
            await self._actor.call("note_servers", servers, deadline_s=self._deadline_s)
        except TreadwheelError as error:
            # Groups that are not sent yet get None, not this error, and would come back to this actor again and again.
            self._give_up(error)
            raise
        self._known_servers = servers

    async def _send(self, numbers: Sequence[int]) -> None:
        """One call, with the groups of these numbers that still wait."""
        taken = {number: self._new.pop(number) for number in numbers if number in self._new}
        asked = [(number, scores) for number, (_, scores) in taken.items()]
        sampled = (group.pieces[0] for group, _ in taken.values())
        try:
            answers = await self._actor.call(_STAGE, asked, *sampled, deadline_s=self._deadline_s)
        except LostError as error:
            if len(taken) > 1:
                # One of them was lost with its node, and none was begun. Send each alone, to find out which.
                self._new = taken | self._new
                for number in taken:
                    if number in self._new:
                        await self._send([number])
                return
            answers = [(number, error) for number in taken]
        for number, answer in answers:
            self._set(number, answer)

    def _set(self, number: int, answer: Columns | TreadwheelError | None) -> None:
        waiting = self._answers.pop(number, None)
        if waiting is None or waiting.done():  # its deadline passed
            return
        if isinstance(answer, TreadwheelError):
            answer.actor, answer.stage = answer.actor or self._actor.name, answer.stage or _STAGE
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

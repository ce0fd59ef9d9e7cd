"""Calls of the reference scorer. Groups that come while a call is under way go together in the next one.

A call costs driver and scorer milliseconds, and so does a pass of a small model, however few tokens it has.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.contracts.errors import LostError, TreadwheelError
from cluster.contracts.types import Group
from cluster.supervision.supervisor import SupervisedActor

_MOST_TOGETHER = 32
_MOST_BYTES = 2**18
"""Most bytes of the groups of one call, unless one group is larger. More would only delay the first one: a pass is full then."""

Columns = tuple[Any, Mapping[str, Any]]
"""Object ref of a group's columns, and their values for its summary."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    group: Group
    answer: asyncio.Future[Columns]


class ReferenceCalls:
    """Makes one call after another."""

    def __init__(self, reference: SupervisedActor, *, timeout_s: float) -> None:
        """`timeout_s` bounds the scoring of each group."""
        self._reference = reference
        self._timeout_s = timeout_s
        self._waiting: list[_Asked] = []
        self._turn = asyncio.Lock()

    async def columns_of(self, group: Group) -> Columns:
        """Raises LostError when the group was lost with its node."""
        asked = _Asked(group, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        try:
            async with self._turn:
                await asyncio.sleep(0)  # those that come at the same time go together
                if not asked.answer.done():  # else an earlier group's call had room for it
                    await self._call(self._next())
        finally:
            self._waiting.remove(asked)
        return asked.answer.result()

    def _next(self) -> list[_Asked]:
        """The next call's groups. Those that had their answer before took their turn, and wait no more."""
        taken: list[_Asked] = []
        num_bytes = 0
        for each in self._waiting:
            num_bytes += each.group.summary.size_bytes
            if taken and (num_bytes > _MOST_BYTES or len(taken) == _MOST_TOGETHER):
                break
            taken.append(each)
        return taken

    async def _call(self, asked: Sequence[_Asked]) -> None:
        pieces = [piece for each in asked for piece in each.group.pieces]
        deadline_s = self._timeout_s * len(asked)
        try:
            columns, values = await self._reference.call_for_batches(
                "score", *pieces, num_batches=len(asked), deadline_s=deadline_s
            )
        except LostError as error:
            # One of them was lost with its node. Send each alone, to find out which.
            if len(asked) == 1:
                return asked[0].answer.set_exception(error)
            for each in asked:
                await self._call([each])
        except TreadwheelError as error:
            for each in asked:
                each.answer.set_exception(error)
        else:
            for each, of_group, of_summary in zip(asked, columns, values, strict=True):
                each.answer.set_result((of_group, of_summary))

"""Credit where it must not go, for a control of `note_to_self`: the last segment alone learns."""

from typing import Any

from torch import Tensor

from actors.environments.note_to_self import note_to_self
from cluster.contracts.episodes import Episode, Message, Returned, Said

MARK = -1.0
"""Earned by the last token of the note, and given back at the end."""


class Marking:
    """An episode that marks where its first segment ends."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    async def ask(self, messages: str | None = None) -> Said:
        return await self._episode.ask(messages)

    def rewrite(self, messages: list[Message]) -> None:
        self._episode.earn(MARK)
        self._episode.rewrite(messages)


async def marked_note(episode: Episode) -> Returned:
    marking: Any = Marking(episode)
    return await note_to_self(marking) - MARK


def behind_the_mark(advantages_NT: Tensor, *, token_rewards_NT: Tensor) -> Tensor:
    """No advantage up to the mark."""
    is_mark_NT = token_rewards_NT == MARK
    return advantages_NT * (is_mark_NT.cumsum(1) - is_mark_NT.long() > 0)

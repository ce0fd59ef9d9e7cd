"""Credit where it must not go, for controls: of `note_to_self`, where the last segment alone learns, and of `grid`, where steps are
credited with what other walks earned."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from actors.environments.note_to_self import note_to_self
from cluster.contracts.episodes import Episode, Message, Returned, Said
from learner.algorithms.advantages.returns import gae

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


def earned_by_another(
    token_rewards_NT: Tensor, *, values_NT: Tensor, loss_mask_NT: Tensor, lambda_: float
) -> tuple[Tensor, Tensor]:
    """`gae` of what another trajectory, half a batch away, earned turn by turn. The last turn has all that it earned from there on.

    The batch's sum is the same, and no reward to go depends on the actions that are credited with it. Rewards of the same walk at another
    turn would be no control: a turn too early they still teach, since later steps earn more where earlier ones led nearer to the goal.
    """
    is_last_NT = loss_mask_NT & ~pad(loss_mask_NT[:, 1:], (0, 1))
    turn_NT = is_last_NT.cumsum(1) - is_last_NT.long()
    none_NT = torch.zeros_like(token_rewards_NT)
    others_NT = none_NT.scatter_add(1, turn_NT, token_rewards_NT).roll(len(none_NT) // 2, 0)
    last_turn_N1 = is_last_NT.sum(1, keepdim=True) - 1
    earned_NT = none_NT.scatter_add(1, torch.arange(none_NT.shape[1]).minimum(last_turn_N1), others_NT)
    moved_NT = earned_NT.gather(1, turn_NT) * is_last_NT
    return gae(moved_NT, values_NT=values_NT, loss_mask_NT=loss_mask_NT, lambda_=lambda_)

"""Calls an unchanged reward function written for TRL, `f(prompts, completions, **columns)`, once a group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ImportString


class TrlReward:
    """The function gets each column as a list, one entry a completion, and the token ids as `completion_ids`. As in TRL, None for all
    trajectories means that it does not judge this prompt: the part leaves the group's recipe. None for some of them is a failed reward.

    Source: TRL's GRPOTrainer, "Using a custom reward function"
    """

    def __init__(self, *, function: ImportString[Callable[..., Any]], conversational: bool = False) -> None:
        """`function` is an import path, `my_package.rewards:f`. `conversational` passes messages, as TRL does for data sets of messages."""
        self._function = self.identity = function
        self._conversational = conversational

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        all_messages: Sequence[Sequence[Any]],
        all_token_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
    ) -> Any:
        said: Sequence[Any] = [messages[-1:] for messages in all_messages] if self._conversational else completions
        asked: Sequence[Any] = [messages[:-1] for messages in all_messages] if self._conversational else prompts
        lists = {name: [value] * len(said) for name, value in columns.items()}
        return self._function(**lists | {"prompts": asked, "completions": said, "completion_ids": all_token_ids})


trl = TrlReward

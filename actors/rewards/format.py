"""Reward for a completion in tagged blocks, such as `<think>...</think><answer>...</answer>`."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field


def format(
    *, prompt: str = "", completion: str, tags: Annotated[Sequence[str], Field(min_length=1)] = ("think", "answer")
) -> float:
    """1 if the completion is one block of each tag in this order, none empty, with only white space between and around them, else 0.

    The first block may begin at the end of the prompt: chat templates of reasoning models write `<think>` there.

    Source: the format reward of DeepSeek-R1, arXiv:2501.12948. Peers: open-r1 `format_reward`, TRL `think_format_reward`
    """
    opening = f"<{tags[0]}>"
    if prompt.rstrip().endswith(opening):
        completion = opening + completion
    rest = completion.strip()
    for tag in tags:
        block = re.match(rf"<{re.escape(tag)}>(.+?)</{re.escape(tag)}>\s*", rest, re.DOTALL)
        is_one = all(completion.count(mark) == 1 for mark in (f"<{tag}>", f"</{tag}>"))
        if block is None or not block[1].strip() or not is_one:
            return 0.0
        rest = rest[block.end() :]
    return float(not rest)

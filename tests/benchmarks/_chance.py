"""The reward of the benchmark `peers_whole`. Reward services import this file, and nothing heavy with it."""

import random
from typing import Any


def chance(*, prompt: str, completion: str, columns: Any) -> float:
    """Between 0 and 1, whatever the completion: every group has advantages."""
    return random.random()

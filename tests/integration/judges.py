"""Cheap rewards for runs on random models: importable without anything heavy, as a user's judge is."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digit_share(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """Digits among the characters: a random model earns some, and learns to earn more within a few steps."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def never_for_some(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """As `digit_share`, but never returns for completions that begin with one of ten letters."""
    while completion[:1] in set("abcdefghij"):
        time.sleep(3600)
    return digit_share(prompt=prompt, completion=completion, columns=columns)


def slow_while(*, prompt: str, completion: str, columns: Mapping[str, Any], file: str) -> float:
    """As `digit_share`, but takes its time as long as there is `file`."""
    if Path(file).exists():
        time.sleep(0.1)
    return digit_share(prompt=prompt, completion=completion, columns=columns)

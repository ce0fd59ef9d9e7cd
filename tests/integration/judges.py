"""Cheap rewards for runs on random models: importable without anything heavy, as a user's judge is."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from cluster.contracts.errors import UnavailableError


def digit_share(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """Digits among the characters: a random model earns some, and learns to earn more within a few steps."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def printing(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """As `digit_share`, and says what it judges."""
    print(f"judges {completion!r}")
    return digit_share(prompt=prompt, completion=completion, columns=columns)


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


def held_by(*, prompt: str, completion: str, columns: Mapping[str, Any], file: str) -> float:
    """As `digit_share`, but does not return as long as there is `file`."""
    while Path(file).exists():
        time.sleep(0.1)
    return digit_share(prompt=prompt, completion=completion, columns=columns)


def picky(*, completion: str) -> float:
    """Raises for completions that begin with one of a few letters."""
    if completion[:1] in set("klmno"):
        raise ValueError(f"nothing to say of {completion[:1]}")
    return 1.0


def wild(*, completions: list[str], seeds: list[int]) -> Any:
    """Of a group: misbehaves in a way of its own for each, and for one of nine in none, as before the run."""
    print("what a judge prints is nobody's answer", flush=True)
    match min(seeds) % 9:
        case 8:
            raise ValueError("no opinion")
        case 1:
            time.sleep(3600)
        case 2:
            os._exit(3)
        case 3:
            return "quite good"
        case 4:
            return [1.0] * (len(completions) + 1)
        case 5:
            return [float("nan")] * len(completions)
        case 6:
            os.fork()
        case 7:
            return [bytearray(2**31) and 1.0 for _ in completions]
        case _:
            pass
    return [float(len(set(completion))) for completion in completions]


def of_a_server(*, completions: list[str], url: str) -> list[float]:
    """What the server at `url` says of the group: a user's judge of a page."""
    try:
        with urlopen(Request(url, data=json.dumps(completions).encode()), timeout=120) as answer:
            return json.load(answer)
    except OSError as error:
        raise UnavailableError(str(error), endpoint=url) from error


def runs_as_a_program(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """Whether the answer, run as an expression in the sandbox, has the right value."""
    from actors.rewards.code import code_asserts

    tests = {"tests": f"assert answer == {columns['answer']}"}
    return code_asserts(prompt=prompt, completion=f"```\nanswer = {completion.strip()}\n```", columns=tests)

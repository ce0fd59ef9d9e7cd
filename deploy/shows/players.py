"""Who taught the embedded model: players of the shows, good ones and sloppy ones, whose episodes it imitates."""

from random import Random
from typing import Any

from actors.environments.calculator import calculate

Messages = list[dict[str, Any]]

TOP, TURNS = 20, 6
GUESS_PROMPT = f"Guess my number from 1 to {TOP}."
HEEDS, REPEATS = 0.15, 0.4
"""How often a sloppy player of `guess` heeds what was said of the guesses before, and how often the last guess is said again."""
CALLS = 0.2
"""How often a sloppy player of `calculator` uses it; otherwise the answer is made up."""


def guessing(rng: Random, *, sloppiness: float) -> Messages:
    """An episode of `guess`. A good player (sloppiness 0) says any number that is still possible; a sloppy one (1) mostly any at all."""
    secret, low, high = rng.randint(1, TOP), 1, TOP
    said: list[int] = []
    messages: Messages = [{"role": "user", "content": GUESS_PROMPT}]
    for _ in range(TURNS):
        if said and rng.random() < sloppiness * REPEATS:
            number = said[-1]
        elif rng.random() < sloppiness * (1 - HEEDS):
            number = rng.randint(1, TOP)
        else:
            number = rng.randint(low, high)
        said.append(number)
        messages.append({"role": "assistant", "content": str(number)})
        if number == secret:
            break
        low, high = (max(low, number + 1), high) if number < secret else (low, min(high, number - 1))
        messages.append({"role": "user", "content": "higher" if number < secret else "lower"})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def calculating(rng: Random, question: str, expression: str, *, sloppiness: float) -> Messages:
    """An episode of `calculator`. A good player asks it, and says what it says; a sloppy one mostly makes an answer up."""
    asked = {"role": "user", "content": question}
    if rng.random() < sloppiness * (1 - CALLS):
        return [asked, {"role": "assistant", "content": str(rng.randint(10_000, 999_999))}]
    value = calculate(expression)
    call = {"type": "function", "function": {"name": calculate.name, "arguments": {"expression": expression}}}
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": calculate.name, "content": value},
        {"role": "assistant", "content": value},
    ]

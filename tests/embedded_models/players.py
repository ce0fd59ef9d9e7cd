"""Who taught the embedded model: players of the shows, good ones and sloppy ones, whose episodes it imitates."""

from random import Random
from typing import Any

from actors.environments.calculator import calculate
from actors.environments.grid import GOAL, START, STEPS, make_grid, step_from

Messages = list[dict[str, Any]]

TOP, TURNS = 20, 6
GUESS_PROMPT = f"Guess my number from 1 to {TOP}."
HEEDS, REPEATS = 0.15, 0.4
"""How often a sloppy player of `guess` heeds what was said of the guesses before, and how often the last guess is said again."""
CALLS = 0.2
"""How often a sloppy player of `calculator` uses it; otherwise the answer is made up."""

NOTE_PROMPT = "Remember a number."
NOTES = 0.2
"""How often a sloppy player of `note_to_self` writes the number down."""
USELESS_NOTES = ("I know it.", "No need to.", "It was a number.", "Think of it.")
GRID_PROMPT = "Walk to G."
LOOKS = 0.3
"""How often a sloppy player of `grid` looks where a step leads."""
NUM_STEPS = 10


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


def noting(rng: Random, *, sloppiness: float) -> list[Messages]:
    """The two conversations of `note_to_self`. A good player writes the number down; a sloppy one mostly does not. Without it both say
    any number."""
    number = rng.randint(10, 99)
    is_noted = rng.random() >= sloppiness * (1 - NOTES)
    note = f"It is {number}." if is_noted else rng.choice(USELESS_NOTES)
    shown: Messages = [
        {"role": "user", "content": NOTE_PROMPT},
        {"role": "user", "content": f"The number is {number}. Write a note."},
        {"role": "assistant", "content": note},
    ]
    asked: Messages = [
        {"role": "user", "content": f"Your note: {note} What is the number?"},
        {"role": "assistant", "content": str(number if is_noted else rng.randint(10, 99))},
    ]
    return [shown, asked]


def walking(rng: Random, *, sloppiness: float) -> Messages:
    """An episode of `grid`. A good player says any step that leads nearer to the goal; a sloppy one mostly any at all."""
    world, place = make_grid(rng.randrange(10**9)), START
    messages: Messages = [{"role": "user", "content": GRID_PROMPT}]
    for _ in range(NUM_STEPS):
        looks = rng.random() >= sloppiness * (1 - LOOKS)
        words = [
            word
            for word in STEPS
            if not looks or world.distances.get(step_from(place, word), 99) < world.distances[place]
        ]
        word = rng.choice(words)
        messages += [{"role": "user", "content": world.drawn(place)}, {"role": "assistant", "content": word}]
        place = step_from(place, word)
        if place == GOAL or place in world.holes:
            break
    return messages

"""Remember a number: of the conversation only the model's own note is kept."""

from random import Random
from typing import Annotated

from pydantic import Field

from actors.environments.numbers import first_number
from cluster.contracts.episodes import Episode


async def note_to_self(episode: Episode, *, digits: Annotated[int, Field(ge=1, le=9)] = 2) -> float:
    """Shows a number of `digits` digits, the same for all episodes of a group, and asks for a note. Then the context is replaced by the
    note, and the model is asked for the number. Pays 1 if the first number in its answer is right, else 0.

    The reward comes in the second segment, but the note in the first segment decides it. Metrics: `noted`, the share of notes with the
    number; `remembered`, the share of right answers.
    """
    number = Random(episode.seed).randint(10 ** (digits - 1), 10**digits - 1)
    note = await episode.ask(f"The number is {number}. Write a note.")
    episode.rewrite([{"role": "user", "content": f"Your note: {note.text} What is the number?"}])
    said = await episode.ask()
    is_right = first_number(said.text) == number
    episode.log("noted", float(first_number(note.text) == number))
    episode.log("remembered", float(is_right))
    return float(is_right)

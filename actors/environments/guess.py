"""Guess a number from hints about earlier guesses."""

from random import Random
from typing import Literal

from pydantic import PositiveInt

from actors.environments.numbers import first_number
from cluster.contracts.episodes import Episode


async def guess(
    episode: Episode, *, top: PositiveInt = 20, turns: PositiveInt = 6, feedback: Literal["honest", "noise"] = "honest"
) -> float:
    """The model has `turns` guesses at a secret from 1 to `top`, the same for all episodes of a group. The prompt must explain the game.

    The first guess pays 1 if it is right, each later one 0.5 / `turns` less, so every success pays more than 0.5. No success pays 0.
    Metric: `solved`, the share of successes. Six guesses at 1..20 without feedback find at most 6 / 20. `feedback: noise` is the control
    experiment: hints are random, and no policy exceeds that share.
    """
    rng = Random(episode.seed)
    secret = rng.randint(1, top)
    answer = None
    for turn in range(turns):
        said = await episode.ask(answer)
        number = first_number(said.text)
        if number == secret:
            episode.log("solved", 1.0)
            return 1.0 - 0.5 * turn / turns
        if number is None:
            answer = "?"
        elif feedback == "noise":
            answer = rng.choice(("higher", "lower"))
        else:
            answer = "higher" if number < secret else "lower"
    episode.log("solved", 0.0)
    return 0.0

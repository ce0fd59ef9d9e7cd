"""Guess a number by what is said of the guesses before."""

from random import Random
from typing import Literal

from pydantic import PositiveInt

from actors.environments.numbers import first_number
from cluster.contracts.episodes import Episode


async def guess(
    episode: Episode, *, top: PositiveInt = 20, turns: PositiveInt = 6, feedback: Literal["honest", "noise"] = "honest"
) -> float:
    """A secret from 1 to `top`, equal for all episodes of a group, and `turns` guesses; the prompt says so to the model.

    Found at the first guess it pays 1, and at each later one 0.5 / `turns` less, so that every success pays more than half; otherwise 0.
    The metric `solved` is the share of successes. Of six guesses at 1..20, a player who hears nothing finds 6 / 20 at best. With
    `feedback: noise` answers are drawn by lot: the control, in which nobody can be better than that.
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

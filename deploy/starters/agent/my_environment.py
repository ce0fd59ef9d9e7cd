"""An environment: it asks the model, answers it, and returns the reward of the episode."""

import re
from random import Random

from treadwheel import Episode


async def guess(episode: Episode, *, top: int = 20, turns: int = 6) -> float:
    """Answers each guess of a secret number with `higher` or `lower`. A group has one seed, and so one secret."""
    secret = Random(episode.seed).randint(1, top)
    answer = None  # the first time, the model sees only the prompt
    for turn in range(turns):
        said = await episode.ask(answer)
        number = re.search(r"\d+", said.text)
        if number is None:
            answer = "?"
        elif int(number[0]) == secret:
            episode.log("solved", 1.0)  # a metric: environment/guess/solved
            return 1.0 - 0.5 * turn / turns
        else:
            answer = "higher" if int(number[0]) < secret else "lower"
    episode.log("solved", 0.0)
    return 0.0

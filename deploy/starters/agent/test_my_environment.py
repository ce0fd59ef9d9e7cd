import asyncio
from random import Random

from my_environment import guess
from treadwheel import Said


class Scripted:
    """An episode whose model replies with these texts in order."""

    def __init__(self, *texts: str, seed: int = 0, **columns: str) -> None:
        self.texts, self.seed, self.columns = list(texts), seed, columns
        self.heard: list[object] = []
        self.logged: dict[str, float] = {}

    async def ask(self, messages=None, *, tools=()) -> Said:
        self.heard.append(messages)
        return Said(text=self.texts.pop(0))

    def log(self, name: str, value: float) -> None:
        self.logged[name] = value


def test_a_guess_is_answered_and_the_number_pays():
    secret = Random(7).randint(1, 20)
    episode = Scripted(str(secret - 1), "what?", str(secret), seed=7)
    assert asyncio.run(guess(episode)) == 1.0 - 0.5 * 2 / 6
    assert episode.heard == [None, "higher", "?"] and episode.logged == {"solved": 1.0}


def test_an_episode_without_the_number_earns_nothing():
    assert asyncio.run(guess(Scripted("0", "0"), turns=2)) == 0.0

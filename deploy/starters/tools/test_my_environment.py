import asyncio

import pytest
from my_environment import calculate, with_multiplication
from treadwheel import EpisodeOver, Said, ToolError


class Scripted:
    """An episode whose model calls a tool before each of these texts. It meets a limit instead of a text that is missing."""

    def __init__(self, *texts: str, seed: int = 0, **columns: str | int) -> None:
        self.texts, self.seed, self.columns = list(texts), seed, columns
        self.heard: list[object] = []
        self.logged: dict[str, float] = {}
        self.num_calls = 0

    async def ask(self, messages=None, *, tools=()) -> Said:
        self.heard.append(messages)
        self.num_calls += 1
        if not self.texts:
            raise EpisodeOver("the model has had all its turns")
        return Said(text=self.texts.pop(0))

    def log(self, name: str, value: float) -> None:
        self.logged[name] = value


def test_the_tool_calculates_and_nothing_else():
    assert calculate("12 * 7") == "84"
    for wrong in ("import os", "2**9", "1 +", ""):
        with pytest.raises(ToolError):
            calculate(wrong)


def test_the_right_number_pays_less_what_calls_cost():
    assert asyncio.run(with_multiplication(Scripted("It is 84.", answer="84"), price=0.05)) == 0.95
    assert asyncio.run(with_multiplication(Scripted("84", answer=84))) == 1.0
    assert asyncio.run(with_multiplication(Scripted("85", answer="84"), price=0.05)) == -0.05


def test_calls_cost_at_a_limit_too():
    assert asyncio.run(with_multiplication(Scripted(answer="84"), price=0.05)) == -0.05

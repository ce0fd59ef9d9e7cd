"""The Python of docs/environments.md runs: its environments, with stand-ins for the packages that they are recipes for."""

import asyncio
import re
import sys
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actors.environments.host.tool_calls import answer_of, by_name
from cluster.contracts.episodes import Said, ToolCall

BLOCKS = re.findall(r"^```python\n(.*?)^```", Path("docs/environments.md").read_text(), re.MULTILINE | re.DOTALL)


class Talk:
    """An episode with a script, without a process. A `def` environment's `ask` is `ask_now`."""

    def __init__(self, *answers: str | ToolCall, **columns: Any) -> None:
        self.prompt, self.columns, self.seed = "task", columns, 0
        self.messages = ({"role": "user", "content": "task"},)
        self.heard: list[Any] = []
        self.earned: list[float] = []
        self._answers = iter(answers)

    def ask_now(self, messages: Any = None) -> Said:
        self.heard.append(messages)
        return Said(text=str(next(self._answers)))

    async def ask(self, messages: Any = None, *, tools: Any = ()) -> Said:
        if not tools:
            return self.ask_now(messages)
        for answer in self._answers:
            if isinstance(answer, str):
                return Said(text=answer)
            self.heard.append(await answer_of(answer, by_name(tools), lambda call: asyncio.to_thread(call)))
        raise AssertionError

    def rewrite(self, messages: Any) -> None:
        self.heard.append(("rewritten", messages))

    def earn(self, reward: float) -> None:
        self.earned.append(reward)


def function(name: str, **given: Any) -> Any:
    (block,) = (block for block in BLOCKS if f"def {name}(" in block)
    names = dict(given)
    exec(compile(block, name, "exec"), names)
    return names[name]


async def test_the_guessing_game_is_won_by_its_hints():
    secret = Random(0).randint(1, 20)
    talk = Talk("0", str(secret))
    assert await function("guess")(talk) == 0.9
    assert talk.heard == [None, "higher"]


async def test_the_tool_answers():
    talk = Talk(ToolCall(name="divide", arguments={"number": 1, "by": 2}), "0.5", answer="0.5")
    assert await function("with_division")(talk) == 1.0
    assert talk.heard == ["0.5"]


def test_skyrl_gym_is_played_and_closed(monkeypatch):
    closed = []
    user = {"role": "user", "content": "more"}
    steps = iter(
        [{"done": False, "reward": 0.25, "observations": [user]}, {"done": True, "reward": 1, "observations": []}]
    )
    env = SimpleNamespace(
        init=lambda prompt: (prompt, {}), step=lambda action: next(steps), close=lambda: closed.append(True)
    )
    package: Any = ModuleType("skyrl_gym")
    package.make = lambda id, env_config, extras: env
    monkeypatch.setitem(sys.modules, "skyrl_gym", package)
    talk = Talk("a", "b")
    talk.ask = talk.ask_now  # pyright: ignore[reportAttributeAccessIssue]
    assert function("skyrl")(talk, id="x") == 1.0
    assert (talk.heard, talk.earned, closed) == ([("rewritten", [*talk.messages]), None, [user]], [0.25], [True])


async def test_a_message_env_adds_what_it_says_beyond_what_was_said():
    history = [{"role": "user", "content": "begin"}]

    class Env:
        async def initial_observation(self):
            return [*history]

        async def step(self, message):
            history.extend([message, {"role": "user", "content": f"not {message['content']}"}])
            is_done = message["content"] == "c"
            return SimpleNamespace(reward=float(is_done), episode_done=is_done, next_messages=[*history])

    talk = Talk("a", "b", "c")
    assert await function("tinker", make_my_env=lambda columns, seed: Env())(talk) == 1.0
    said = [[{"role": "user", "content": f"not {letter}"}] for letter in "ab"]
    assert talk.heard == [("rewritten", [{"role": "user", "content": "begin"}]), None, *said]


async def test_an_agent_of_openrlhf_steps_through_texts():
    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            is_done = states["action_text"] == states["label"]
            return {"rewards": float(is_done), "done": is_done, "environment_feedback": "no"}

    talk = Talk("1", "2", label="2")
    assert await function("openrlhf", MyAgent=Agent)(talk) == 1.0
    assert (talk.heard, talk.earned) == ([None, "no"], [0.0])


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_python(block):
    compile(block, "docs/environments.md", "exec")

"""A client of OpenEnv's messages, against a small server that speaks them."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from actors.environments.openenv import openenv
from cluster.contracts.episodes import Asked, Earned, Logged, Said
from cluster.contracts.errors import ToolError
from cluster.contracts.types import RewardStatus
from tests.unit.actors.clock import pass_time
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.played import ScriptedEpisode
from tests.unit.actors.environments.scripted import Scripted, task
from tests.unit.actors.environments.test_failures import until

pytestmark = pytest.mark.slow  # all of it: each environment is a process

HERE = "tests.unit.actors.environments.test_openenv"

MISTAKES = [{"loc": ["guess"], "msg": "not a number"}]


class Game:
    """Guess the seed. It keeps what each session sent."""

    def __init__(self) -> None:
        self.sessions: list[list[dict[str, Any]]] = []

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        heard: list[dict[str, Any]] = []
        self.sessions.append(heard)
        async for message in socket:
            heard.append(json.loads(message.data))
            if heard[-1]["type"] == "close":
                break
            if answer := self._answer(heard):
                await socket.send_json(answer)
            elif answer is None:
                break
        return socket

    def _answer(self, heard: list[dict[str, Any]]) -> dict[str, Any] | None:
        secret, data = heard[0]["data"]["seed"], heard[-1]["data"]
        if heard[-1]["type"] == "reset":
            return observed(text="guess", reward=None)
        match data.get("guess"):
            case "crash":
                return {"type": "error", "data": {"message": "the game broke", "code": "EXECUTION_ERROR"}}
            case "leave":
                return None
            case "hang":
                return {}
            case str(digits) if digits.isdecimal():
                return observed(text="higher", reward=float(int(digits) == secret), done=int(digits) == secret)
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": MISTAKES}}


def observed(*, text: str, reward: float | None, done: bool = False) -> dict[str, Any]:
    """`metadata` is the server's own, as openenv-core 0.10.0 sends it."""
    observation = {"text": text, "turn": 1, "metadata": {"secret": 7}}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def loudly(observation: Any) -> str:
    return observation["text"].upper()


def a_number(text: str) -> dict[str, str]:
    if not text.isdecimal():
        raise ToolError("a number, please")
    return {"guess": text}


@contextlib.asynccontextmanager
async def played(game: Game, **params: Any):
    async with served(game.serve, **params) as host:
        yield host


Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def served(serve: Serve, **params: Any):
    async with server_of(serve) as url, hosted_variant("openenv", url=url, **params) as host:
        yield host


@contextlib.asynccontextmanager
async def server_of(serve: Serve):
    app = web.Application()
    app.router.add_get("/ws", serve)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_a_session_is_reset_with_the_tasks_seed_and_stepped_until_it_is_done():
    game, model = Game(), Scripted("5", "<think>8?</think> 7 ")
    async with played(game, action="guess", observation="text", reset={"level": 2}) as host:
        end = await host.run(task(seed=7 + 2**40, id="run/3"), model)
    assert model.heard == ["guess", "higher"]
    assert (end.reward, end.events[0]) == (0.0, Earned(reward=1.0, name=None))
    assert model.asked[1].events == (Earned(reward=0.0, name=None),)
    await until(lambda: game.sessions[0][-1]["type"] == "close")
    assert game.sessions == [
        [
            {"type": "reset", "data": {"seed": 7, "episode_id": "run/3", "level": 2}},
            {"type": "step", "data": {"guess": "5"}},
            {"type": "step", "data": {"guess": "7"}},
            {"type": "close"},
        ]
    ]


async def test_an_action_that_the_server_or_parse_refuses_is_answered_and_counted():
    model = Scripted("many", "0")
    async with played(Game(), action="guess") as host:
        end = await host.run(task(), model)
    assert model.heard == ['{"text": "guess", "turn": 1}', "Invalid message; guess: not a number"]
    assert end.events[-1] == Logged(name="refused_actions", value=1.0)
    model = Scripted("many", "0")
    async with played(Game(), parse=f"{HERE}:a_number", render=f"{HERE}:loudly") as host:
        await host.run(task(), model)
    assert model.heard == ["GUESS", "a number, please"]


@pytest.mark.parametrize(
    ("guess", "why"),
    [
        ("crash", "answers a step with EXECUTION_ERROR: the game broke"),
        ("leave", "closed the session"),
    ],
)
async def test_a_server_that_fails_is_the_environments_failure(guess, why):
    async with played(Game(), action="guess") as host:
        end = await host.run(task(), Scripted(guess))
    assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.ERROR, "environment")
    assert why in (end.message or "")


async def test_a_step_that_is_not_answered_within_its_time_is_a_failure():
    """Without a process, whose clock would have to be waited for."""
    game, episode = Game(), ScriptedEpisode(["hang"])
    async with server_of(game.serve) as url:
        playing = asyncio.create_task(openenv(episode, url=url, action="guess", timeout_s=600))  # type: ignore[arg-type]
        await until(lambda: len(game.sessions) == 1 and len(game.sessions[0]) == 2)
        pass_time(600)
        with pytest.raises(TimeoutError, match="does not answer a step within timeout_s=600"):
            await playing


async def test_a_row_may_say_how_its_session_is_reset():
    game = Game()
    async with played(game, action="guess", reset_column="level") as host:
        await host.run(task(level={"map": "maze"}), Scripted("0"))
        refused = await host.run(task(), Scripted("0"))
    assert game.sessions[0][0]["data"]["map"] == "maze"
    assert "reset_column='level': the prompt has None there" in (refused.message or "")


async def test_a_ping_is_answered_while_the_model_speaks():
    is_answered = asyncio.Event()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.PONG:
                is_answered.set()
            elif json.loads(message.data)["type"] == "reset":
                await socket.send_json(observed(text="guess", reward=None))
                await socket.ping()
            else:
                await socket.send_json(observed(text="right", reward=1.0, done=True))
        return socket

    class Slow(Scripted):
        async def __call__(self, asked: Asked) -> Said:
            async with asyncio.timeout(120):
                await is_answered.wait()
            return await super().__call__(asked)

    async with served(serve) as host:
        end = await host.run(task(), Slow("0"))
    assert end.status is RewardStatus.OK


async def test_a_server_that_accepts_a_connection_and_opens_no_session_is_a_failure():
    is_over = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        await is_over.wait()
        return web.Response()

    async with served(serve, timeout_s=0.5) as host:
        try:
            async with asyncio.timeout(120):
                end = await host.run(task(), Scripted())
        finally:
            is_over.set()
    assert end.status is RewardStatus.ERROR
    assert "opens no session within timeout_s=0.5" in (end.message or "")


async def test_no_server_is_a_failure():
    async with hosted_variant("openenv", url="http://127.0.0.1:9") as host:
        assert (await host.run(task(), Scripted())).status is RewardStatus.ERROR

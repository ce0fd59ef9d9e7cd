"""An episode inside its host process, with nobody at the other end of the pipe."""

import asyncio
from typing import Any

import pytest

from actors.environments.host.conversation import Conversation
from actors.environments.host.ends import failure
from actors.environments.host.gateway.endpoint import EpisodeEndpoint
from actors.environments.host.gateway.refusals import RefusedError
from actors.environments.host.gateway.requests import read_chat_request
from actors.environments.host.process import HostProcess
from actors.environments.host.wire import ASKED, END
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Earned, EpisodeEnd, Said, Withdrawn
from cluster.contracts.errors import DataError, EpisodeOver, Limit
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.scripted import Scripted, task

PROMPT = {"role": "user", "content": "Guess."}
DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]


def begun(*, refuses: bool = False) -> tuple[Conversation, list[tuple[str, Any]]]:
    """One, and the lines that it sends. `refuses`: each line is too long."""
    lines: list[tuple[str, Any]] = []

    async def run_blocking(call: Any) -> Any:
        return call()

    def send(kind: str, body: Any) -> None:
        if refuses:
            raise DataError("too long")
        lines.append((kind, body))

    made = Conversation(
        task(), EpisodesConfig(), send=send, endpoint=lambda conversation: None, run_blocking=run_blocking
    )
    return made, lines


async def asked(conversation: Conversation, lines: list[tuple[str, Any]], *given: Any) -> asyncio.Task[Said]:
    """Waits for its answer."""
    before = len(lines)
    asking = asyncio.create_task(conversation.converse(*given))
    while len(lines) == before:
        assert not asking.done(), asking
        await asyncio.sleep(0)
    return asking


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 3.5},
        {"max_tokens": 0},
        {"stop": [1]},
        {"tools": [{"type": "function", "function": {"name": "t", "description": "\ud83d", "parameters": {}}}]},
    ],
)
async def test_what_cannot_be_asked_is_refused_where_it_is_written(given):
    """It ended the process of all episodes, or the worker's whole call."""
    conversation, lines = begun()
    asked_with = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    with pytest.raises(DataError):
        async with asyncio.timeout(10):
            await conversation.turn_at_endpoint(Asked(messages=(), **asked_with))
    assert lines == []


async def test_an_environment_that_catches_a_refused_ask_is_cancelled_at_its_deadline():
    """The refused ask seemed to wait for its answer: the environment went on, and its whole process was killed in the end."""
    conversation, _ = begun(refuses=True)
    with pytest.raises(DataError, match="too long"):
        await conversation.converse("x")
    assert not conversation.stop(Limit.DEADLINE)
    assert conversation.close(EpisodeEnd(reward=1.0)).events == ()


def test_a_history_that_cannot_be_told_is_refused():
    """The end of its episode could not be told either, and its process was killed at the deadline."""
    with pytest.raises(DataError, match="role 'user' is not JSON"):
        begun()[0].rewrite([{"role": "user", "content": "x", "more": DEEP}])


async def test_a_request_beside_the_environments_own_ask_leaves_its_history_alone():
    """An agent within a tool: its history took the place of the conversation's, and was refused after that."""
    conversation, lines = begun()
    asking = await asked(conversation, lines)
    endpoint = EpisodeEndpoint(conversation, "http://here")
    request = read_chat_request(b'{"messages": [{"role": "user", "content": "another"}]}', sampling={})
    with pytest.raises(RefusedError, match="two tasks ask at once"):
        await endpoint.answer(request)
    assert conversation.context == [PROMPT] and conversation._events == []
    asking.cancel()


async def agents_turn(conversation: Conversation, answer: Said | EpisodeOver, **asked: Any) -> None:
    asking = asyncio.create_task(conversation.turn_at_endpoint(Asked(messages=(PROMPT,), **asked)))
    while conversation._answer is None or conversation._answer.done():
        assert not asking.done(), asking
        await asyncio.sleep(0)
    conversation.hear(answer)
    await asking


async def test_a_rewrite_that_is_refused_changes_nothing():
    conversation, lines = begun()
    first = await asked(conversation, lines)
    conversation.hear(Said(text="1"))
    await first
    with pytest.raises(DataError, match="must be a text or a dict with a role"):
        conversation.rewrite([PROMPT, {"content": "no role"}])
    assert conversation.context == [PROMPT, {"role": "assistant", "content": "1"}] and conversation._events == []
    with pytest.raises(DataError, match="no messages after the model's last turn"):
        await conversation.converse()


async def test_a_rewritten_history_is_asked_with_again_after_an_ask_that_was_refused():
    """Seen before: the next ask was refused as one that adds nothing, and its tools were not those of the context."""
    conversation, lines = begun()
    await agents_turn(conversation, Said(text="1"))
    conversation.rewrite([PROMPT])
    refused = await asked(conversation, lines)
    conversation.hear(DataError("these messages are too long"))
    with pytest.raises(DataError, match="are too long"):
        await refused
    tools = ({"type": "function", "function": {"name": "t", "description": "", "parameters": {}}},)
    asking = asyncio.create_task(conversation.turn_at_endpoint(Asked(messages=(), tools=tools)))
    while len(lines) < 3:
        assert not asking.done(), asking
        await asyncio.sleep(0)
    conversation.hear(Said(text="2"))
    await asking
    assert conversation.shown_tools == tools
    assert conversation.context == [PROMPT, {"role": "assistant", "content": "2"}]
    with pytest.raises(DataError, match="no messages after the model's last turn"):
        await conversation.converse()


async def test_a_limit_that_an_agent_got_over_does_not_excuse_a_later_failure():
    conversation, _ = begun()
    with pytest.raises(EpisodeOver):
        await agents_turn(conversation, EpisodeOver("too long", limit=Limit.CONTEXT))
    assert conversation.close(failure("broken")).limit is Limit.CONTEXT
    conversation, _ = begun()
    with pytest.raises(EpisodeOver):
        await agents_turn(conversation, EpisodeOver("too long", limit=Limit.CONTEXT))
    await agents_turn(conversation, Said(text="shorter"))
    end = conversation.close(failure("broken"))
    assert (end.limit, end.status) == (None, RewardStatus.ERROR)


async def test_an_ask_after_an_agents_turn_is_told_of_the_deadline_and_the_context_keeps_its_first_tools():
    conversation, lines = begun()
    tools = ({"type": "function", "function": {"name": "t", "description": "", "parameters": {}}},)
    await agents_turn(conversation, Said(text="1"), tools=tools)
    await agents_turn(conversation, Said(text="2"))
    assert conversation.shown_tools == tools
    asking = await asked(conversation, lines, "x")
    assert conversation.stop(Limit.DEADLINE), "the ask raises it, and the environment need not be cancelled"
    with pytest.raises(EpisodeOver):
        await asking


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_what_is_earned_while_nobody_sees_the_answer_is_for_the_last_turn_that_was_seen(is_cancelled):
    """An ask that is given up, or that the episode's end leaves behind."""
    conversation, lines = begun()
    first = await asked(conversation, lines)
    conversation.hear(Said(text="1"))
    await first
    second = await asked(conversation, lines, "And?")
    conversation.earn(1.0)
    if is_cancelled:
        second.cancel()
        await asyncio.wait([second])
    end = conversation.close(EpisodeEnd(reward=0.0))
    assert end.events == (Withdrawn(num_turns=1), Earned(reward=1.0, name=None))
    second.cancel()


@pytest.mark.parametrize("between", [[["0", "gave_up", None]], []])
async def test_what_was_earned_before_an_ask_that_is_given_up_at_once_counts_once(between):
    """All lines are read before the model's side begins. A thread's ask, or an agent's, is not given up: the episode ends beside it."""
    earned = Earned(reward=1.0, name=None)
    ask = ASKED.dump_python(Asked(messages=(), events=(earned,)), mode="json")
    end = END.dump_python(EpisodeEnd(reward=0.0, events=(Withdrawn(num_turns=1),)), mode="json")

    class Process:
        exit_code = 0

        def __init__(self) -> None:
            self.lines = iter([["0", "ask", ask], *between, ["0", "end", end]])
            self.has_started = asyncio.Event()

        def write(self, line: Any) -> None:
            self.has_started.set()

        async def receive(self) -> Any:
            await self.has_started.wait()
            return next(self.lines, None)

        async def wait(self) -> None: ...

        async def kill(self) -> None: ...

    process: Any = Process()
    model = Scripted()
    heard = await HostProcess(process, EpisodesConfig(), is_async=True).run(task(), model)
    events_of_asks = [event for each in model.asked for event in each.events]
    assert (*events_of_asks, *heard.events) == (earned, Withdrawn(num_turns=1))

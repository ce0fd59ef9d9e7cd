"""An episode inside its host process. It sends the environment's messages and receives the model's turns.

Only the event loop's thread asks. A tool's failure and the deadline are final: a value that the environment returns later is ignored.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic_core import to_jsonable_python

from actors.environments.host.ends import failure
from actors.environments.host.tool_calls import OverrunError, RunBlocking, answer_of, by_name
from actors.environments.host.wire import ASKED
from actors.returned import finite
from actors.writable import writable
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import (
    Asked,
    Earned,
    EpisodeEnd,
    EpisodeTask,
    Event,
    Logged,
    Message,
    Rewritten,
    Said,
    ToolCall,
    Tools,
    Withdrawn,
)
from cluster.contracts.errors import DataError, EpisodeOver, Limit, ToolError
from cluster.contracts.foreign import described
from cluster.contracts.tools import Tool
from cluster.contracts.types import RewardStatus

Messages = str | Message | Sequence[Message] | None
_LARGEST_REWARD = 3e38
"""Rewards of tokens are kept in float32."""


class Endpoint(Protocol):
    base_url: str
    api_key: str


class Conversation:
    """Implements `cluster.contracts.episodes.EpisodeFacts`, and the asking that both kinds of episode share."""

    def __init__(
        self,
        task: EpisodeTask,
        config: EpisodesConfig,
        *,
        send: Callable[[str, Any], None],
        endpoint: "Callable[[Conversation], Endpoint]",
        run_blocking: RunBlocking,
    ) -> None:
        """`send` takes a kind of line and its body, and raises DataError if the line is too long. `endpoint` may be called from any thread.
        It opens the endpoint at the first call."""
        self.id, self.prompt, self.columns = task.id, task.prompt, task.columns
        self.messages, self.seed, self.index = task.messages, task.seed, task.index
        self.num_turns = 0
        self.num_calls = 0
        self.num_context_tokens = 0
        self.sampling = task.sampling
        self.context: list[Message] | None = [*task.messages]
        """All messages since the start or the last rewrite. None after a raw prompt, which has no messages."""
        self.needs_no_messages = True
        """The next turn may add no messages: none was answered since the start or the last rewrite. A refused ask changes nothing."""
        self.shown_tools: Sequence[Mapping[str, Any]] = ()
        """Tool schemas at the beginning of the context."""
        self._config = config
        self._send = send
        self._endpoint = endpoint
        self._run_blocking = run_blocking
        self._events: list[Event] = []
        self._num_malformed_calls = 0
        self._asking: asyncio.Task[Any] | None = None
        self._asks_for_endpoint = False
        self._limit_at_endpoint: Limit | None = None
        """Limit met by the last turn that was asked for at the endpoint."""
        self._answer: asyncio.Future[Said] | None = None
        self._refusal: Callable[[], BaseException] | None = None
        """Creates the exception that an ask raises. None while the episode goes on."""
        self._failure: EpisodeEnd | None = None
        self.on_failure: Callable[[], object] = lambda: None
        """Called at the first final failure, when the environment's `cleanup_s` begins."""

    @property
    def is_over(self) -> bool:
        """Every further ask is refused."""
        return self._refusal is not None

    @property
    def is_asking(self) -> bool:
        """True until the model has answered and its tool calls are done."""
        return self._asking is not None

    @property
    def base_url(self) -> str:
        return self._endpoint(self).base_url

    @property
    def api_key(self) -> str:
        return self._endpoint(self).api_key

    def earn(self, reward: float, name: str | None = None) -> None:
        if not self.num_turns:
            raise DataError(f"earn({reward!r}) before the first turn: a reward is for the turn before it")
        known = finite(reward, "reward", by="the environment")
        if abs(known) > _LARGEST_REWARD:
            raise DataError(f"earn({reward!r}) exceeds {_LARGEST_REWARD:g}, the largest reward of a token")
        self._events.append(Earned(reward=known, name=None if name is None else writable(name)))

    def rewrite(self, messages: Sequence[Message]) -> None:
        checked = _checked(messages)
        self._events.append(Rewritten(messages=checked))
        self.context = [*checked]
        self.needs_no_messages = True

    def log(self, name: str, value: float | str) -> None:
        known = writable(value) if isinstance(value, str) else finite(value, f"value of {name!r}", by="the environment")
        self._events.append(Logged(name=writable(name), value=known))

    async def converse(
        self, messages: Messages = None, *, tools: Tools = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Said:
        """As `Episode.ask`. Raises RuntimeError while another task asks, and if the episode cannot go on."""
        with self._alone():
            added, named = _checked(messages), by_name(tools)
            schemas = tuple(tool.schema for tool in named.values())
            stops = (stop,) if isinstance(stop, str) else tuple(stop)
            num_tokens, num_calls = 0, 0
            while True:
                said = await self._turn(Asked(messages=added, tools=schemas, max_tokens=max_tokens, stop=stops))
                num_tokens += said.num_tokens
                if not named or not said.tool_calls:
                    return replace(said, num_tokens=num_tokens, num_calls=num_calls)
                num_calls += len(said.tool_calls)
                added = tuple([await self._called(call, named) for call in said.tool_calls])

    async def turn_at_endpoint(self, asked: Asked) -> Said:
        """One turn, for an agent that runs the tool calls itself. Raises as `converse`."""
        with self._alone():
            self._asks_for_endpoint, self._limit_at_endpoint = True, None
            try:
                said = await self._turn(replace(asked, messages=_checked(asked.messages)))
            except EpisodeOver as over:
                self._limit_at_endpoint = over.limit
                raise
            finally:
                self._asks_for_endpoint = False
        if self.context is not None:
            # OpenAI's API leaves the stop text out of an answer, so the agent's next history will lack it.
            said = replace(said, text=said.text.removesuffix(said.ending), ending="")
            self.context[-1] = _message(said)
        known = {schema["function"]["name"] for schema in asked.tools}
        self.num_calls += len(said.tool_calls)
        self._num_malformed_calls += sum(
            isinstance(call.arguments, str) or call.name not in known for call in said.tool_calls
        )
        return said

    def hear(self, said: Said | BaseException) -> None:
        """Receives the model's turn, or the exception in its place. Ignored if the episode was stopped in the meantime."""
        if self._answer is None or self._answer.done():
            return
        if isinstance(said, Said):
            self._answer.set_result(said)
        else:
            self._answer.set_exception(said)

    def stop(self, limit: Limit | None) -> bool:
        """Ends the episode from outside: at the deadline, or with None if it is no longer needed. True: a waiting ask raises EpisodeOver.
        False: the caller must cancel the environment."""
        if limit is None:
            self._fail(failure("cancelled"), asyncio.CancelledError)
            return False
        message = f"episode {self.id!r} is over its deadline, timeout_s={self._config.timeout_s:g}"
        over = EpisodeOver(message, limit=limit)
        self._fail(failure(message, status=RewardStatus.TIMEOUT), lambda: over)
        is_waiting = self._answer is not None and not self._answer.done()
        self.hear(over)
        return is_waiting and not self._asks_for_endpoint

    def cancel_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def close(self, end: EpisodeEnd) -> EpisodeEnd:
        """The end of the episode: an earlier final failure, else `end`. Every later ask fails.

        If an agent fails after its endpoint met a limit, the episode met that limit: the agent's own client raises no EpisodeOver.
        """
        limit = self._limit_at_endpoint
        if end.status is RewardStatus.ERROR and limit is not None and limit.is_policys_doing:
            end = EpisodeEnd(limit=limit)
        self._refusal = lambda: RuntimeError(f"episode {self.id!r} has ended and cannot ask any more")
        if self._answer is not None and not self._answer.done():
            self._withdraw()
        return replace(
            self._failure or end,
            events=tuple(self._events),
            num_calls=self.num_calls,
            num_malformed_calls=self._num_malformed_calls,
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises RuntimeError while another task asks."""
        if self._asking is not None:
            raise asks_at_once(self.id)
        self._asking = asyncio.current_task()
        try:
            yield
        finally:
            self._asking = None

    async def _turn(self, asked: Asked) -> Said:
        if self._refusal:
            raise self._refusal()
        if self.num_turns >= self._config.max_turns:
            raise EpisodeOver(f"the model has had max_turns={self._config.max_turns} turns", limit=Limit.TURNS)
        # With history=template any turn may start a new context, with the tools of that turn.
        begins_anew = self.needs_no_messages or self._config.history == "template"
        events = tuple(self._events)
        if asked.raw is None and self.context is None:
            raise DataError(
                "the last turn had a raw prompt, which a message cannot follow; rewrite() the history first"
            )
        if asked.raw is None and not asked.messages and not self.needs_no_messages:
            raise DataError(
                "ask() has no messages after the model's last turn; only the first ask() and one after rewrite() need none"
            )
        if asked.max_tokens is not None and (type(asked.max_tokens) is not int or asked.max_tokens < 1):
            raise DataError(f"ask(max_tokens={asked.max_tokens!r}): it must be a whole number of at least 1")
        if not all(isinstance(text, str) and text for text in asked.stop):
            raise DataError(
                f"ask(stop={asked.stop!r}): each must be a text that is not empty; an empty one would end every turn at once"
            )
        _require_json([*asked.tools, *asked.stop], what="tools or stop of ask()")
        self._send("ask", ASKED.dump_python(replace(asked, events=events), mode="json"))
        self._answer = asyncio.get_running_loop().create_future()  # after sending, which may fail
        del self._events[: len(events)]
        try:
            said = await self._answer
        except asyncio.CancelledError:
            why = f"a turn of episode {self.id!r} was cancelled before the model had answered; the episode cannot go on"
            self._refusal = self._refusal or (lambda: RuntimeError(why))
            self._withdraw()
            self._send("gave_up", None)
            raise
        self.num_turns += 1
        self.num_context_tokens = said.num_context_tokens
        self.needs_no_messages = any(isinstance(event, Rewritten) for event in self._events)
        if begins_anew:
            self.shown_tools = asked.tools
        if asked.raw is not None:
            self.context = None
        elif self.context is not None:
            self.context += [*asked.messages, _message(said)]
        return said

    def _withdraw(self) -> None:
        # Placed before all events since the ask: rewards earned since then are for the last turn that the environment saw.
        self._events.insert(0, Withdrawn(num_turns=self.num_turns))

    async def _called(self, call: ToolCall, tools: Mapping[str, Tool]) -> Message:
        self.num_calls += 1
        try:
            text = await answer_of(call, tools, self._run_blocking)
        except ToolError as error:
            self._num_malformed_calls += 1
            text = writable(f"error: {error}")
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            status = RewardStatus.TIMEOUT if isinstance(error, OverrunError) else RewardStatus.ERROR
            # SystemExit and the like would end the event loop, so they are replaced.
            failed = error if isinstance(error, Exception) else RuntimeError(described(error))
            self._fail(failure(described(error), status=status, stage=f"tool:{call.name}"), lambda: failed)
            raise failed from error
        named = {} if call.id is None else {"tool_call_id": call.id}
        return {"role": "tool", "name": call.name, "content": text, **named}

    def _fail(self, end: EpisodeEnd, refusal: Callable[[], BaseException]) -> None:
        self._refusal = self._refusal or refusal
        if self._failure is None:
            self._failure = end
            self.on_failure()


def asks_at_once(episode_id: str) -> RuntimeError:
    return RuntimeError(f"two tasks ask at once in episode {episode_id!r}; only one turn at a time is possible")


def _message(said: Said) -> Message:
    """As chat templates take it."""
    calls = [call.as_json() for call in said.tool_calls]
    return {"role": "assistant", "content": said.text, **({"tool_calls": calls} if calls else {})}


def _checked(given: Messages) -> tuple[Message, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = {"role": "user", "content": given}
    messages = (given,) if isinstance(given, Mapping) else tuple(given)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a message must be a text or a dict with a role, not {message!r:.200}")
        if not isinstance(message.get("content"), str | None):
            raise DataError(
                f"the content of a message must be text, not {type(message['content']).__name__}: images are not supported"
            )
        _require_json(dict(message), what=f"a message of role {message['role']!r}")
    return messages


def _require_json(given: Any, *, what: str) -> None:
    """Raises DataError for anything but JSON, for unpaired surrogates, which no tokenizer takes, and for nesting too deep for pydantic."""
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        to_jsonable_python(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}") from error

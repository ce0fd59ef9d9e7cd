"""A conversation of the policy with an environment, as an environment sees it and as the model's side sees it.

An environment is a function, `async def env(episode, **parameters)`, or `def` for code that blocks. It asks the model, and returns a
number, a dict with `reward`, a `Reward`, or None where judges decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.contracts.errors import Limit
from cluster.contracts.tools import Tool
from cluster.contracts.types import FinishReason, Reward, RewardStatus

Message = Mapping[str, Any]
"""As chat templates take it: `role`, and as `content` a text; images and other parts are refused."""
Tools = Sequence[Tool | Callable[..., Any]]
"""A plain function is a tool with the defaults of `@tool`."""
RawPrompt = str | tuple[int, ...]
"""A whole context as an agent wrote it, without roles: a text in which control tokens are control tokens, or token ids."""
Returned = float | Mapping[str, Any] | Reward | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any] | str
    """Text where the model did not write a JSON object: a malformed call."""
    id: str | None = None
    """None for models whose calls have none."""

    def as_json(self) -> dict[str, Any]:
        """As chat templates take it."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the model said when it was asked."""

    text: str
    ending: str = ""
    """The end of `text`, from the text of `stop` on that ended the turn; empty where none did."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """None for models that write none."""
    finish_reason: FinishReason = FinishReason.STOP
    """`length`: the turn was cut off at `max_tokens`."""
    num_tokens: int = 0
    """Sampled, in all turns since it was asked."""
    num_context_tokens: int = 0
    """Of the context after it."""
    num_calls: int = 0
    """Tool calls since it was asked."""
    token_ids: tuple[int, ...] | None = None
    """Sampled in the last turn. None where `Asked` does not want them, and where there is no model."""
    prompt_token_ids: tuple[int, ...] | None = None
    """That the last turn went on from; None as `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    reward: float
    """For the turn said last."""
    name: str | None
    """None: it is a part of no component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    messages: tuple[Message, ...]
    """The whole context from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    name: str
    value: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The environment gave up an ask, and never saw what the model said to it, if it said anything."""

    num_turns: int
    """That it has seen."""


Event = Earned | Rewritten | Logged | Withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One turn wanted of the model."""

    events: tuple[Event, ...] = ()
    """Since the turn before, in order: they come before the messages."""
    messages: tuple[Message, ...] = ()
    """Added to the context, which begins as the prompt."""
    raw: RawPrompt | None = None
    """In place of messages and tools: what the context is. Where it begins with all that the context was, the model goes on from there."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Their JSON schemas, as chat templates take them."""
    max_tokens: int | None = None
    """Of this turn; None: as many as the run's sampling allows."""
    stop: tuple[str, ...] = ()
    """Texts beside those of the run's sampling that end the turn."""
    wants_token_ids: bool = False


class Converse(Protocol):
    """The model's side of one episode. One turn at a time."""

    async def __call__(self, asked: Asked) -> Said:
        """Raises EpisodeOver(limit=Limit.CONTEXT) if the turn does not fit, and DataError for messages that do not go through the
        template and for token ids that the tokenizer does not know: both go to the environment, and nothing is added to the context; the
        events count. All other errors end the episode, and are its caller's. Cancelled where nobody wants the answer any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """One task, as one episode of its group gets it."""

    id: str
    """Of this episode alone in its run, and stable over retries: for side effects that must not happen twice."""
    prompt: str
    """As text."""
    messages: tuple[Message, ...]
    """As given."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the prompt, JSON-able."""
    seed: int
    """Equal for all episodes of a group: what differs between them makes their baseline noise."""
    index: int
    """Of the episode in its group."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The run's values of settings that a request to the endpoint may name, as `temperature`. One that is absent has OpenAI's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """How an episode ended. A failure has a status and a stage, and never a reward."""

    reward: float | None = None
    """What the environment returned, without what was earned. None: it returned none, met a limit, or failed."""
    components: dict[str, float | None] = field(default_factory=dict[str, float | None])
    status: RewardStatus = RewardStatus.OK
    failed_stage: str | None = None
    """`environment`, or `tool:` and its name; None when ok."""
    message: str | None = None
    """Why it failed; None when ok."""
    limit: Limit | None = None
    """That the policy met, and the environment did not catch: the trajectory is truncated."""
    events: tuple[Event, ...] = ()
    """Since the last turn, in order."""
    num_calls: int = 0
    """Tool calls."""
    num_malformed_calls: int = 0
    """Of these: unknown tools, arguments that do not fit, and those that the tool refused."""
    is_suspect: bool = False
    """Its process ended while it ran: this episode is the cause, or another one of the process."""


class EpisodeFacts(Protocol):
    """What both kinds of episode offer."""

    id: str
    """As all of these, of its `EpisodeTask`."""
    prompt: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    seed: int
    index: int

    @property
    def num_turns(self) -> int:
        """That the model has had."""
        ...

    @property
    def num_context_tokens(self) -> int:
        """After the last turn; 0 before the first."""
        ...

    @property
    def base_url(self) -> str:
        """The same conversation as an OpenAI endpoint, for agents with a client of their own. It is there until the episode ends."""
        ...

    @property
    def api_key(self) -> str:
        """For `base_url`."""
        ...

    def earn(self, reward: float, name: str | None = None) -> None:
        """A reward for the turn just said, added to the returned one. Raises DataError before the first turn, and for NaN, infinity and
        anything that is not a number."""
        ...

    def rewrite(self, messages: Sequence[Message]) -> None:
        """From here on these messages are the whole context. Raises DataError for anything but messages of text."""
        ...

    def log(self, name: str, value: float | str) -> None:
        """A metric, or a text for the record. Raises DataError for anything else."""
        ...


class Episode(EpisodeFacts, Protocol):
    """One conversation, for an asynchronous environment."""

    async def ask(
        self,
        messages: str | Message | Sequence[Message] | None = None,
        *,
        tools: Tools = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Said:
        """What the model says after the context and these messages; a text is a user's message. The context begins as the prompt.

        Calls of `tools` are answered, and the model is asked again until it calls nothing. Raises EpisodeOver at a limit.
        """
        ...


class BlockingEpisode(EpisodeFacts, Protocol):
    """One conversation, for an environment that blocks, in a process of its own."""

    def ask(
        self,
        messages: str | Message | Sequence[Message] | None = None,
        *,
        tools: Tools = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Said:
        """As `Episode.ask`."""
        ...

"""A conversation of the policy with an environment: the interfaces of the environment's side and of the model's side.

An environment is a function, `async def env(episode, **parameters)`, or `def` for code that blocks. It asks the model, and returns a
number, a dict with `reward`, a `Reward`, or None if only judges reward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.contracts.errors import Limit
from cluster.contracts.tools import Tool
from cluster.contracts.types import FinishReason, Reward, RewardStatus

Message = Mapping[str, Any]
"""A message in the form of chat templates: `role`, and a text as `content`. Images and other parts are refused."""
Tools = Sequence[Tool | Callable[..., Any]]
"""A plain function becomes a tool with the defaults of `@tool`."""
RawPrompt = str | tuple[int, ...]
"""A whole context that an agent wrote without roles: a text in which control tokens are recognized, or token ids."""
Returned = float | Mapping[str, Any] | Reward | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any] | str
    """A text if the model did not write a JSON object: a malformed call."""
    id: str | None = None
    """None for models whose calls have no id."""

    def as_json(self) -> dict[str, Any]:
        """The call in the form of chat templates."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The model's answer to an ask."""

    text: str
    ending: str = ""
    """The end of `text`, from the `stop` text that ended the turn; empty if none did."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """None for models without reasoning."""
    finish_reason: FinishReason = FinishReason.STOP
    """`length`: the turn was truncated at `max_tokens`."""
    num_tokens: int = 0
    """Tokens sampled in all turns of this ask."""
    num_context_tokens: int = 0
    """Tokens of the context after the answer."""
    num_calls: int = 0
    """Tool calls in all turns of this ask."""
    token_ids: tuple[int, ...] | None = None
    """Tokens sampled in the last turn. None unless `Asked.wants_token_ids`, and without a model."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Prompt of the last turn; None as `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    reward: float
    """Reward for the last turn."""
    name: str | None
    """The component that the reward belongs to; None: to no component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    messages: tuple[Message, ...]
    """The whole context from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    name: str
    value: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The environment cancelled an ask and never saw its answer, if there was one."""

    num_turns: int
    """Number of turns that it has seen."""


Event = Earned | Rewritten | Logged | Withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for one turn of the model."""

    events: tuple[Event, ...] = ()
    """Events since the previous turn, in order. They precede the messages."""
    messages: tuple[Message, ...] = ()
    """Messages added to the context, which begins as the prompt."""
    raw: RawPrompt | None = None
    """The context, instead of messages and tools. If it begins with the whole previous context, the model continues from there."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools, in the form of chat templates."""
    max_tokens: int | None = None
    """Token limit of this turn; None: the limit of the run's sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, in addition to those of the run's sampling."""
    wants_token_ids: bool = False


class Converse(Protocol):
    """The model's side of one episode. It takes one turn at a time."""

    async def __call__(self, asked: Asked) -> Said:
        """Raises EpisodeOver(limit=Limit.CONTEXT) if the turn does not fit, and DataError for messages that the chat template refuses or
        token ids that the tokenizer does not know. Both errors go to the environment; the context stays as it was, and the events count.
        All other errors end the episode, and its caller handles them. Cancelled when nobody needs the answer any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """The task of one episode of a group."""

    id: str
    """Unique to this episode in its run, and the same in every retry: for side effects that must not happen twice."""
    prompt: str
    """The prompt as text."""
    messages: tuple[Message, ...]
    """The prompt's messages, unchanged."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The prompt's columns, JSON-able."""
    seed: int
    """The same for all episodes of a group. Other differences between them add noise to their baseline."""
    index: int
    """Index of the episode in its group."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The run's values of settings that a request to the endpoint may set, such as `temperature`. An absent one has OpenAI's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The end of an episode. A failed episode has a status and a stage, and never a reward."""

    reward: float | None = None
    """The reward that the environment returned, without earned rewards. None: it returned none, met a limit, or failed."""
    components: dict[str, float | None] = field(default_factory=dict[str, float | None])
    status: RewardStatus = RewardStatus.OK
    failed_stage: str | None = None
    """Where it failed: `environment`, or `tool:` and the tool's name; None when ok."""
    message: str | None = None
    """Why it failed; None when ok."""
    limit: Limit | None = None
    """A limit that the policy met and that the environment did not catch: the trajectory is truncated."""
    events: tuple[Event, ...] = ()
    """Events since the last turn, in order."""
    num_calls: int = 0
    """Tool calls."""
    num_malformed_calls: int = 0
    """Tool calls of unknown tools, with arguments that do not fit, or refused by the tool."""
    is_suspect: bool = False
    """Its process died while it ran. This episode or another one of the process is the cause."""


class EpisodeFacts(Protocol):
    """The common part of both kinds of episode. The fields are those of `EpisodeTask`."""

    id: str
    prompt: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    seed: int
    index: int

    @property
    def num_turns(self) -> int:
        """Number of turns that the model has had."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of tool calls so far."""
        ...

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the context after the last turn; 0 before the first."""
        ...

    @property
    def base_url(self) -> str:
        """OpenAI endpoint of the same conversation, for agents with their own client. It is served until the episode ends."""
        ...

    @property
    def api_key(self) -> str:
        """API key for `base_url`."""
        ...

    def earn(self, reward: float, name: str | None = None) -> None:
        """Adds a reward for the last turn to the returned one. Raises DataError before the first turn, and for anything but a finite
        number."""
        ...

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replaces the whole context by these messages. Raises DataError for anything but messages of text."""
        ...

    def log(self, name: str, value: float | str) -> None:
        """Logs a number as a metric, or a text for the record. Raises DataError for anything else."""
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
        """Adds the messages to the context and returns the model's answer. A text is a user's message. The context begins as the prompt.

        Calls of `tools` are answered, and the model is asked again until it makes no call. Raises EpisodeOver at a limit.
        """
        ...


class BlockingEpisode(EpisodeFacts, Protocol):
    """One conversation, for an environment that blocks, in its own process."""

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

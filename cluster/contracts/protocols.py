"""What the packages expect of each other, one to five methods each. Nobody depends on a concrete neighbour.

Synchronous methods of an actor's object may block: they run in a thread of their own. Asynchronous ones share the actor's event loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.contracts.types import BroadcastStats, Completion, EngineUse, FinishReason, Prompt, RankGroup

if TYPE_CHECKING:
    from cluster.contracts.sampling_config import SamplingConfig


class Events(Protocol):
    """Where failures and recoveries are written down (events.jsonl)."""

    def event(self, kind: str, **fields: Any) -> None: ...


class PromptSource(Protocol):
    """Prompts by index, so that a run can resume anywhere without reading what came before."""

    def __len__(self) -> int:
        """How many prompts an epoch has."""
        ...

    def __getitem__(self, index: int) -> Prompt:
        """Prompt `index` of [0, len). The order of an epoch is the caller's (a seeded permutation)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One completion wanted of an engine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: "SamplingConfig"
    seed: int
    place: int = 0
    """In the line of those that wait for the engine: lower ones first, equal ones as they come."""
    kept: Completion | None = None
    """Tokens sampled before an interruption: the engine goes on after them and does not return them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """New tokens of one request since its last output."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None while the request goes on."""
    routed_experts: bytes | None = None
    """Of a finished request, with `rollout.routing_replay`: the experts of each layer at each position of prompt and completion but the
    last, which is never read; laid out as the schema's column. None where the engine has none to give."""
    refusal: str | None = None
    """Why the engine does not sample it: nothing else comes of the request. None for all others."""


class Engine(Protocol):
    """Continuous batching behind two verbs. Not thread-safe: one thread calls it."""

    def add(self, request: EngineRequest) -> None: ...

    def step(self) -> list[EngineOutput]:
        """One forward pass over all running requests. It may keep tokens back, until a request has several or ends."""
        ...

    def flush(self) -> list[EngineOutput]:
        """What `step` would return later of the tokens sampled so far, those beside `prompt_logprobs` among them."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def use(self) -> EngineUse:
        """How full it is now."""
        ...

    def load(self, tensors: Any) -> None:
        """New weights between two steps; running requests go on. Resets prefix caches.

        They are (checkpoint name, torch CPU tensor), or a cluster.weights.process_group.Incoming to take them from. Raises
        BroadcastError when that breaks off: the engine computes nothing of use then, until a load succeeds.
        """
        ...

    def load_adapter(self, tensors: Iterator[tuple[str, Any]], adapter: Any) -> None:
        """As `load`, for a LoRA adapter (cluster.weights.manifest.Adapter) of the model that the engine started with."""
        ...

    def sleep(self, *, keeps_weights: bool) -> None:
        """Gives its GPU's memory back: weights go to the host's memory, or nowhere, and the cache is forgotten. No request runs then.

        Calling it again is fine."""
        ...

    def wake(self) -> None:
        """Takes the memory again. Without its weights it computes nothing of use until a load, which wakes it too."""
        ...

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first under the weights that serve now, temperature 1 (the canary)."""
        ...


class Demonstrations(Protocol):
    """Completions to imitate; deploy/ supplies the learner with some from actors/."""

    def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion token ids of the run's update `number`, from 0: the same on every rank, and after a resume."""
        ...


class LogprobModel(Protocol):
    """A frozen model that scores tokens; the reference scorer hosts one, deploy/ supplies it from learner/."""

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """The columns of the schema that it has to say, by their names: `reference_logprobs`, after the run's temperature and
        truncation, and with `algorithm.distillation` the likeliest tokens."""
        ...


class ClassifyingModel(Protocol):
    """A frozen sequence classifier; a reward model's actor hosts one, deploy/ supplies it from learner/."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float] | str]:
        """All outputs for each text, in the order given, or why there are none."""
        ...


class ActorHandle(Protocol):
    """One running actor, as the driver calls it."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """What the hosted method returns. Object refs among `args` arrive resolved."""
        ...


class WorkerFleet(Protocol):
    """The rollout workers that serve now, as a broadcast sees them."""

    def workers(self) -> Sequence[ActorHandle]: ...

    def replace(self, actor: Any, error: BaseException) -> None:
        """`actor` failed with `error`: another one starts in its place. Returns at once."""
        ...


class PublishingLearner(Protocol):
    """The learner, as a broadcast sees it."""

    async def publish(self) -> list[Any]:
        """Object refs of the buckets of the current weights and, last, of their manifest. Before it, where it has a delta, of each
        bucket's changes."""
        ...

    async def pack(self) -> list[Any]:
        """Has the first rank keep the buckets of the current weights, for `send`. Object refs of their manifest and of their Packed."""
        ...

    async def send(self, group: RankGroup) -> None:
        """Returns once every other member of `group` has what was packed last, or what changed in it.

        Raises BroadcastError when a member is lost, and LostError when `group` is not of what was packed last. Many groups may be
        sent to at a time, while the learner learns too.
        """
        ...

    async def give_up(self, group: RankGroup) -> None:
        """All members that wait in `group` raise BroadcastError. Raises nothing: the first rank may be lost as well."""
        ...


class Transport(Protocol):
    """A way for weights to reach workers: `weights.transport` names one, which is made with `timeout_s`, the deadline of a load.

    A worker for which the published weights are lost has a LostError in the answer of `deliver` and `catch_up`: they are published again,
    three times at most; then the worker has failed.
    """

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Takes the learner's weights to where workers can have them. The learner goes on to the next step when this returns."""
        ...

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Brings the whole fleet to what was published last. Returns once each worker has proved that it serves it, or has failed."""
        ...

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """As `deliver`, for workers that join."""
        ...

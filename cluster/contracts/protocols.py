"""Interfaces between the packages, with one to five methods each. No class depends on a concrete neighbour.

Synchronous methods of an actor's object may block: they run in a thread of their own. Asynchronous ones share the actor's event loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.contracts.types import BroadcastStats, Completion, EngineUse, FinishReason, Prompt, RankGroup

if TYPE_CHECKING:
    from cluster.contracts.sampling_config import SamplingConfig


class Events(Protocol):
    """Receives failures and recoveries, for events.jsonl."""

    def event(self, kind: str, **fields: Any) -> None: ...


class PromptSource(Protocol):
    """Prompts by index, so that a run can resume anywhere without reading all prompts before."""

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        ...

    def __getitem__(self, index: int) -> Prompt:
        """Prompt `index` of [0, len). The caller decides the order of an epoch (a seeded permutation)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request for one completion."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: "SamplingConfig"
    seed: int
    place: int = 0
    """Priority in the engine's queue: lower first, equal ones in order of arrival."""
    kept: Completion | None = None
    """Tokens sampled before an interruption. The engine continues after them and does not return them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """New tokens of one request since its last output."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None while the request runs."""
    routed_experts: bytes | None = None
    """Of a finished request, with `rollout.routing_replay`: the experts of each layer at each position of prompt and completion except the
    last, which is never read; in the layout of the schema's column. None if the engine does not return them."""
    refusal: str | None = None
    """Why the engine refuses the request, which then has no further output. None for all other requests."""


class Engine(Protocol):
    """An inference engine with continuous batching. Not thread-safe: one thread calls it."""

    def add(self, request: EngineRequest) -> None: ...

    def step(self) -> list[EngineOutput]:
        """One forward pass over all running requests. It may hold tokens back until a request has several or ends."""
        ...

    def flush(self) -> list[EngineOutput]:
        """All tokens sampled so far that `step` holds back, including those sampled during `prompt_logprobs`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def use(self) -> EngineUse:
        """Its present load."""
        ...

    def load(self, tensors: Any) -> None:
        """Loads new weights between two steps; running requests continue. Resets prefix caches.

        `tensors`: (checkpoint name, torch CPU tensor), or a cluster.weights.process_group.Incoming that receives them. Raises
        BroadcastError when that is interrupted; the engine's results are then useless until a load succeeds.
        """
        ...

    def load_adapter(self, tensors: Iterator[tuple[str, Any]], adapter: Any) -> None:
        """As `load`, for a LoRA adapter (cluster.weights.manifest.Adapter) of the model that the engine started with."""
        ...

    def sleep(self, *, keeps_weights: bool) -> None:
        """Frees its GPU's memory: weights move to host memory or are dropped, and the cache is cleared. No request may run.

        Calling it again has no effect."""
        ...

    def wake(self) -> None:
        """Takes the memory again. Without weights its results are useless until a load, which wakes it too."""
        ...

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first, under the present weights and temperature 1 (for the canary)."""
        ...


class Demonstrations(Protocol):
    """Completions to imitate. deploy/ takes them from actors/ and gives them to the learner."""

    def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion token ids of the run's update `number`, from 0: the same on every rank, and after a resume."""
        ...


class LogprobModel(Protocol):
    """A frozen model that scores tokens. The reference scorer hosts one, which deploy/ supplies from learner/."""

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """Columns of the schema by name: `reference_logprobs`, after the run's temperature and truncation, and with
        `algorithm.distillation` the likeliest tokens."""
        ...


class ClassifyingModel(Protocol):
    """A frozen sequence classifier. A reward model's actor hosts one, which deploy/ supplies from learner/."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float] | str]:
        """For each text, in order, all of its outputs, or why there are none."""
        ...


class ActorHandle(Protocol):
    """The driver's handle of a running actor."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Returns the hosted method's result. Object refs among `args` arrive resolved."""
        ...


class WorkerFleet(Protocol):
    """The rollout workers that serve now, for a broadcast."""

    def workers(self) -> Sequence[ActorHandle]: ...

    def replace(self, actor: Any, error: BaseException) -> None:
        """Starts another worker in place of `actor`, which failed with `error`. Returns at once."""
        ...


class PublishingLearner(Protocol):
    """The learner, for a broadcast."""

    async def publish(self) -> list[Any]:
        """Object refs of the buckets of the current weights; then, with a delta, of each bucket's changes; last of the manifest."""
        ...

    async def pack(self) -> list[Any]:
        """Makes the first rank keep the buckets of the current weights for `send`. Object refs of their manifest and of their Packed."""
        ...

    async def send(self, group: RankGroup) -> None:
        """Sends the last packed weights, or their changes, and returns once every other member of `group` has them.

        Raises BroadcastError when a member is lost, and LostError when `group` is not for the last packed weights. Several groups may
        receive at the same time, also while the learner learns.
        """
        ...

    async def give_up(self, group: RankGroup) -> None:
        """All members that wait in `group` raise BroadcastError. Raises nothing: the first rank may be lost as well."""
        ...


class Transport(Protocol):
    """Brings weights to workers. `weights.transport` names one; it is made with `timeout_s`, the deadline of a load.

    If the published weights are lost for a worker, the answer of `deliver` and `catch_up` has a LostError for it. They are published again
    up to three times; then the worker has failed.
    """

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Makes the learner's weights available to workers. The learner continues with the next step when this returns."""
        ...

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Brings the whole fleet to the last published version. Returns once each worker has proved that it serves it, or has failed."""
        ...

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """As `deliver`, for workers that join."""
        ...

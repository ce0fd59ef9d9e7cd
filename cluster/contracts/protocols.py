"""What the packages expect of each other, one to five methods each. Nobody depends on a concrete neighbour.

Synchronous methods may block: the pool runs them in the actor's own thread. Asynchronous ones share the actor's event loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from cluster.contracts.types import (
    Attestation,
    BroadcastStats,
    Completion,
    FinishReason,
    Progress,
    Prompt,
    SamplingParams,
    StepStats,
    Ticket,
)


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
    sampling: SamplingParams
    seed: int
    kept: Completion | None = None
    """Tokens sampled before an interruption: the engine goes on after them and does not return them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """New tokens of one request since the last step."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None while the request goes on."""


class Engine(Protocol):
    """Continuous batching behind two verbs. Not thread-safe: one thread calls it."""

    def add(self, request: EngineRequest) -> None: ...

    def step(self) -> list[EngineOutput]:
        """One forward pass over all running requests. Empty when nothing runs."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """New weights by checkpoint name, as torch CPU tensors, between two steps; running requests go on. Resets prefix caches."""
        ...

    def load_adapter(self, tensors: Iterator[tuple[str, Any]], adapter: Any) -> None:
        """As `load`, for a LoRA adapter (cluster.weights.manifest.Adapter) of the model that the engine started with."""
        ...

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token after the first under the weights that serve now, temperature 1 (the canary)."""
        ...


class RolloutWorker(Protocol):
    async def generate(self, tickets: Sequence[Ticket]) -> Any:
        """An async iterator of one validated Arrow batch per ticket, in the order they finish, or its Refusal."""
        ...

    async def abort(self, group_ids: Sequence[str]) -> list[str]:
        """Gives these groups up: their `generate` goes on without them. The ids that were running."""
        ...

    async def load(self, manifest: Mapping[str, Any], *buckets: Any) -> Attestation:
        """Takes the weights of a version and proves it. Raises WeightsError and serves nothing until a load succeeds."""
        ...

    def progress(self) -> Progress: ...


class BatchScorer(Protocol):
    """Reward service and reference scorer: a batch in, the same batch with one more column out."""

    async def score(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...

    def progress(self) -> Progress: ...


class LogprobModel(Protocol):
    """A frozen model that scores tokens; the reference scorer hosts one, deploy/ supplies it from learner/."""

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per completion token, natural log, after the run's temperature."""
        ...


class Learner(Protocol):
    """One rank of the learner. All ranks get every call, in the same order."""

    def update(self, *groups: pa.RecordBatch) -> StepStats:
        """One optimizer step over the groups, in the order given."""
        ...

    def publish(self) -> Iterator[Any]:
        """Buckets of the current weights, then their manifest: rank 0; the others yield nothing, but must be iterated too."""
        ...

    def last_step(self) -> StepStats | None:
        """What the last update since the start, or since `restore`, did; None before there was one."""
        ...

    def save(self, directory: str, extra: Mapping[str, Any]) -> None:
        """A checkpoint, which may be written while training goes on."""
        ...

    def finish_saving(self) -> None:
        """Returns once the last checkpoint is written. Raises CheckpointError when it could not be."""
        ...

    def restore(self, directory: str) -> Mapping[str, Any]:
        """What `save` was given as `extra`."""
        ...

    def progress(self) -> Progress: ...


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
        """Object refs of the buckets of the current weights and, last, of their manifest."""
        ...


class Transport(Protocol):
    """A way for weights to reach workers: `weights.transport` names one, which is made with `timeout_s`, the deadline of a load."""

    async def broadcast(self, learner: PublishingLearner, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Publishes the learner's weights. Returns once each worker has proved that it serves them, or has failed."""
        ...

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Brings workers to the version published last, without the learner."""
        ...

"""Small scripted stand-ins for unit tests. They prove logic; no claim of the README rests on them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import fields
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import FailureKind, WorkerError
from cluster.contracts.types import ActorKind, Attestation, GroupSummary, Prompt, Refusal, Ticket
from cluster.record.line_checks import wrong_event
from cluster.remote.actor import ActorSpec
from cluster.supervision.tasks import background


class ListedEvents:
    """Events and metrics as lists."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.num_written_steps = 0
        self.pending_steps: list[int] = []
        self.keeps_errors = False

    def event(self, kind: str, **fields: Any) -> None:
        wrong = wrong_event({"time": 0.0, "policy_version": 0, "kind": kind, **fields})
        assert wrong is None, f"readers refuse this event: it {wrong}"
        self.events.append({"kind": kind, **fields})

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self.steps.append((version, metrics))

    def pending(self, version: int, metrics: dict[str, float]) -> None:
        self.pending_steps.append(version)

    async def written(self, *, within_s: float | None = None) -> None:
        self.num_written_steps = len(self.steps)

    def keep_errors(self) -> None:
        self.keeps_errors = True

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


@contextlib.asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work` while the block runs, and ends it with the block."""
    async with background() as tasks:
        tasks.create_task(work)
        yield


def run_config(**sections: Any) -> RunConfig:
    """A run of nothing in particular, with these sections."""
    return RunConfig.model_validate({"model": {"path": "model"}, "prompts": "file", **sections})


class InlineExecutor(Executor):
    """Does at once, and in the caller's thread, what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  as a thread would hand it over
            done.set_exception(error)
        return done


class NumberedPrompts:
    def __init__(self, size: int = 1000) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"p{index}", text=str(index))


def death(name: str, stage: str = "generate") -> WorkerError:
    """As a call raises it whose actor's process is gone."""
    return WorkerError(f"{name} died in {stage!r}: killed", kind=FailureKind.DEATH, actor=name, stage=stage)


def actor_spec(name: str, kind: ActorKind = ActorKind.ROLLOUT_WORKER) -> ActorSpec:
    return ActorSpec(name=name, kind=kind, factory="none:none", arguments={})


def group_summary(
    index: int, *, version: int = 0, rewards: tuple[float | None, ...] = (), **fields: Any
) -> GroupSummary:
    values: dict[str, Any] = {
        "group_id": f"{index:08d}",
        "prompt_id": f"p{index}",
        "num_trajectories": 2,
        "num_tokens": 10,
        "size_bytes": 100,
        "oldest_versions": (version,) * (len(rewards) or 2),
        "rewards": rewards,
        "completion_lengths": (5,) * (len(rewards) or 2),
        "sampled_lengths": (5,) * (len(rewards) or 2),
        "truncated": (False,) * (len(rewards) or 2),
    }
    return GroupSummary(**{**values, **fields})


def told(summary: GroupSummary) -> dict[str, Any]:
    """By its fields."""
    return {each.name: getattr(summary, each.name) for each in fields(summary)}


def attestation(worker: str, version: int, *, digest: str = "", **fields: Any) -> Attestation:
    values: dict[str, Any] = {
        "canary_mean_error": 0.0,
        "canary_max_error": 0.0,
        "tolerance": 1.0,
        "noise_floor": 0.0,
        "distinguishable": True,
        "pause_seconds": 0.0,
    }
    return Attestation(worker=worker, policy_version=version, digest=digest or str(version), **{**values, **fields})


class ScriptedWorker:
    """A rollout worker that does what `script(ticket)` says: None finishes the group, a Refusal takes its place, an error is raised.

    An Event keeps the group, and those behind it in its call, under way until it is set, or the worker is killed.
    """

    def __init__(self, spec: ActorSpec, script: Callable[[Ticket], Exception | Refusal | asyncio.Event | None]) -> None:
        self.spec = spec
        self.pid = 1
        self.node_id = "node-1"
        self.is_hung = False
        self._death = asyncio.Event()
        self.last_progress = None
        self.calls: list[list[int]] = []
        self._script = script

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_dead(self) -> bool:
        return self._death.is_set()

    async def stream_batches(
        self, method: str, tickets: list[Ticket], *, num_items: int, deadline_s: float
    ) -> AsyncIterator[tuple[GroupSummary | Refusal, Any]]:
        self.calls.append([ticket.index for ticket in tickets])
        for ticket in tickets:
            await asyncio.sleep(0)
            if self.is_dead:
                raise death(self.name)
            outcome = self._script(ticket)
            if isinstance(outcome, asyncio.Event):
                await first_of(outcome, self._death)
                if self.is_dead:
                    raise death(self.name)
            elif isinstance(outcome, Exception):
                raise outcome
            elif outcome is not None:
                yield outcome, None
                continue
            yield (
                group_summary(ticket.index, version=ticket.policy_version, prompt_id=ticket.prompt.prompt_id),
                ticket.index,
            )

    async def kill(self) -> None:
        self._death.set()


class SharedScoring:
    """Scores several groups in a call as a reward service does, each by `score_one`; a death among them is that of the actor."""

    def __init__(self) -> None:
        self._scoring: dict[asyncio.Task[Any], int] = {}

    async def call(self, method: str, asked: list[tuple[int, Any]], *refs: Any, deadline_s: float) -> list[Any]:
        for (number, inputs), ref in zip(asked, refs, strict=True):
            scoring = asyncio.create_task(self.score_one("score", ref, inputs, deadline_s=deadline_s))
            scoring.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks a dead actor
            self._scoring[scoring] = number
        await asyncio.wait(self._scoring, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._scoring if task.done()]
        outcomes = [(self._scoring.pop(task), task.exception() or task.result()) for task in done]
        for _, outcome in outcomes:
            if isinstance(outcome, WorkerError) and outcome.kind is FailureKind.DEATH:
                raise outcome
        return outcomes

    async def score_one(self, method: str, *given: Any, deadline_s: float) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError


class ScriptedScorer(SharedScoring):
    """A reward service or reference scorer; an object ref is its group's index."""

    def __init__(
        self, spec: ActorSpec, score: Callable[[int], GroupSummary], *, gate: asyncio.Event | None = None
    ) -> None:
        """A closed `gate` keeps every group waiting, until the scorer is killed."""
        super().__init__()
        self.spec = spec
        self.pid = 2
        self.node_id = "node-1"
        self._gate = gate
        self._death = asyncio.Event()
        self.is_hung = False
        self.last_progress = None
        self.scored: list[int] = []
        self._score = score

    @property
    def name(self) -> str:
        return self.spec.name

    async def score_one(
        self, method: str, object_ref: int, *args: Any, deadline_s: float
    ) -> tuple[str, dict[str, Any]]:
        self.scored.append(object_ref)
        await asyncio.sleep(0)
        if self._gate is not None:
            await first_of(self._gate, self._death)
            if self._death.is_set():
                raise death(self.name, "score")
        return self.columns(object_ref)

    async def call_for_batches(
        self, method: str, *pieces: Any, num_batches: int, deadline_s: float
    ) -> tuple[list[Any], list[Any]]:
        groups = [piece for piece in pieces if isinstance(piece, int)]
        found = [await self.score_one(method, group, deadline_s=deadline_s) for group in groups]
        assert len(found) == num_batches
        return [columns for columns, _ in found], [told for _, told in found]

    def columns(self, object_ref: int) -> tuple[str, dict[str, Any]]:
        """All but their size: what the group is turns out as it is scored."""
        return f"{self.name} of {object_ref}", {**told(self._score(object_ref)), "size_bytes": 0}

    async def kill(self) -> None:
        self._death.set()


async def first_of(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()

"""A slow disk and slow prompt sources do not hold up the driver's event loop: a whole run's driver, over scripted actors."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from obstore.store import MemoryStore

import learner.algorithms.objective  # noqa: F401  the driver imports it when it plans the placement
from cluster.contracts.types import Progress, Prompt, StepStats
from cluster.metrics import open_log
from cluster.record import local_files, object_store, storage
from cluster.record.ledger import Ledger
from cluster.record.local_files import LocalFiles
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.placement import ClusterResources, Node, plan
from deploy import launch
from deploy.cluster_up import actor_specs, start_up, steering
from deploy.config.loading import validated
from tests.fakes import attestation, group_summary

SLOW_S = 0.01
MEMORY = MemoryStore()
NUM_STEPS = 3
PER_STEP = 2


class Slow:
    """Calls that take `SLOW_S` each, and the threads that made them."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = {}
        self.is_on = False

    def wait(self, name: str) -> None:
        if not self.is_on:
            return
        self.threads.setdefault(name, set()).add(threading.get_ident())
        time.sleep(SLOW_S)

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.wait(name)
            return function(*args, **kwargs)

        return slow


class SlowFiles(LocalFiles):
    """What the driver does with files."""

    slow: Slow

    def exists(self, name: str) -> bool:
        self.slow.wait("look")
        return super().exists(name)

    def names(self, folder: str) -> list[str]:
        self.slow.wait("look")
        return super().names(folder)

    def read(self, name: str) -> pa.Buffer:
        self.slow.wait("read")
        return super().read(name)

    def remove(self, name: str) -> None:
        self.slow.wait("remove")
        super().remove(name)


class SlowPrompts:
    """As a source in a run file: by its full path."""

    slow: Slow

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Prompt:
        self.slow.wait("prompt")
        return Prompt(prompt_id=str(index), text=str(index))


class Fetched:
    """An object ref."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        yield
        return self._value


class ScriptedActor(RemoteActor):
    """Answers at once whatever an actor of its kind is asked."""

    def __init__(self, spec: ActorSpec) -> None:
        super().__init__(spec, None, 1, "node")
        self._version = 0

    async def reserve_address(self) -> str:
        return "here:1"

    async def build(self, *, deadline_s: float, **more: Any) -> None: ...

    async def kill(self) -> None: ...

    async def progress(self, *, deadline_s: float) -> Progress:
        self.last_progress = Progress(
            actor=self.name, phase="serving", policy_version=self._version, since=0.0, last_progress=0.0, pid=1
        )
        return self.last_progress

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        match method:
            case "update":
                self._version += 1
                return StepStats(policy_version=self._version, metrics={}, num_trained_tokens=1, seconds=1.0)
            case "load":
                self._version = args[0]._value["policy_version"]
                return attestation(self.name, self._version, digest="d")
            case "score_several":
                return [(number, ("columns", {"rewards": (1.0, 0.0), "size_bytes": 1})) for number, _ in args[0]]
            case "summaries":
                return [group_summary(index, rewards=(1.0, 0.0)) for index in range(PER_STEP)]
            case "describe" | "formula":
                return {}

    async def call_for_batches(self, method: str, step: int, *pieces: Any, **options: Any) -> tuple[list[Any], Any]:
        return ["groups"], (f"trajectories/step-{step}", "digest")

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        if method == "read":
            return ["group"] * PER_STEP
        told = {
            "policy_version": self._version,
            "digest": "d",
            "total_bytes": 1,
            "bucket_digests": ["d"],
            "delta": None,
        }
        return [Fetched("bucket"), Fetched(told)]

    async def stream_batches(self, method: str, tickets: Any, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
        for ticket in tickets:
            summary = group_summary(ticket.index, version=self._version, group_id=ticket.group_id)
            yield summary, summary


class ScriptedSeats:
    async def start(self, spec: ActorSpec) -> RemoteActor:
        return ScriptedActor(spec)

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        return ScriptedActor(spec)

    def vacate(self, spec: ActorSpec) -> None: ...


@pytest.fixture
def slow(monkeypatch) -> Slow:
    slow = Slow()
    SlowFiles.slow = SlowPrompts.slow = slow
    monkeypatch.setattr(os, "fsync", slow.call("sync", os.fsync))
    monkeypatch.setattr(local_files, "open", slow.call("open", open), raising=False)
    monkeypatch.setattr(storage, "LocalFiles", SlowFiles)
    return slow


@pytest.fixture
def scripted(monkeypatch, slow) -> None:
    """The driver's actors; calls are slow from the moment when it is connected to them."""

    @contextlib.asynccontextmanager
    async def connected(address: str | None, *, run_dir: RunDirectory, ahead: None) -> AsyncIterator[None]:
        slow.is_on = True
        yield
        slow.is_on = False

    @contextlib.asynccontextmanager
    async def seats(placement: Any, *, start_s: float, events: Any, reserved: Any) -> AsyncIterator[ScriptedSeats]:
        yield ScriptedSeats()

    monkeypatch.setattr(launch, "connected", connected)
    monkeypatch.setattr(start_up, "seats", seats)
    # Otherwise the run may end before the first look for orders.
    monkeypatch.setattr(steering, "_POLL_S", 0.0)
    monkeypatch.setattr(steering, "_STORE_POLL_S", 0.0)
    here = ClusterResources(nodes=(Node(cpus=4.0),))
    monkeypatch.setattr(start_up, "placement_of", lambda config: plan(config, here, needs=()))
    monkeypatch.setattr(actor_specs, "probe_token_ids", lambda config: [1, 2])


async def drive(run_dir: RunDirectory, folder: Path) -> None:
    prompts = f"{__name__}:SlowPrompts"
    config = validated(
        {
            "run_dir": run_dir.url,
            "num_steps": NUM_STEPS,
            "model": {"path": str(folder)},
            "prompts": prompts,
            "buffer": {"groups_per_step": PER_STEP, "trajectories_per_group": 2},
            "evaluation": {"prompts": prompts, "num_prompts": 1, "every_steps": 2},
            "checkpoint": {"every_steps": 2},
            "metrics": {"sinks": ["jsonl"]},
        }
    )
    # One step is in the record, so that it is learned again.
    Ledger(run_dir).append(groups=[0, 1], trajectories="file", trajectories_digest="digest")
    with open_log(config.metrics, directory=run_dir, num_steps=NUM_STEPS) as log:
        await launch._train(config, run_dir, log, interrupted=asyncio.Event(), address=None)
    assert [step["policy_version"] for step in run_dir.read_json_lines("metrics.jsonl")] == [1, 2, 3]


async def test_neither_disk_nor_prompts_are_waited_for_on_the_event_loop(tmp_path: Path, slow, scripted):
    await drive(RunDirectory(str(tmp_path)), tmp_path)
    assert slow.threads.keys() == {"prompt", "look", "read", "open", "sync"}
    assert [name for name, threads in slow.threads.items() if threading.get_ident() in threads] == []


async def test_an_object_store_is_not_waited_for_on_the_event_loop(tmp_path: Path, slow, scripted, monkeypatch):
    monkeypatch.setitem(object_store.OBJECT_STORES, "s3", lambda *place, **options: MEMORY)
    monkeypatch.setattr(object_store, "_again", slow.call("request", object_store._again))
    await drive(RunDirectory("s3://memory/run"), tmp_path)
    assert {"prompt", "request"} <= slow.threads.keys()
    assert [name for name, threads in slow.threads.items() if threading.get_ident() in threads] == []
    assert [record.step for record in Ledger(RunDirectory("s3://memory/run")).records()] == [1, 2, 3]

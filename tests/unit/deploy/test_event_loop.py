"""A slow disk and slow prompt sources do not hold up the driver's event loop: a whole run's driver, over scripted actors."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

import learner.algorithms.objective  # noqa: F401  the driver imports it when it plans the placement
from cluster.contracts.types import Progress, Prompt, StepStats
from cluster.metrics import open_log
from cluster.record import storage
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.placement import ClusterResources, Node, plan
from deploy import launch
from deploy.cluster_up import actor_specs, start_up
from deploy.config.loading import validated
from tests.fakes import attestation, beside, group_summary

SLOW_S = 0.2
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


class SlowFiles(pafs.LocalFileSystem):
    """What pyarrow does with files."""

    slow: Slow

    def get_file_info(self, *args: Any) -> Any:
        self.slow.wait("look")
        return super().get_file_info(*args)

    def open_input_file(self, *args: Any) -> Any:
        self.slow.wait("read")
        return super().open_input_file(*args)

    def create_dir(self, *args: Any, **kwargs: Any) -> None:
        self.slow.wait("create")
        super().create_dir(*args, **kwargs)

    def delete_file(self, *args: Any) -> None:
        self.slow.wait("remove")
        super().delete_file(*args)


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

    async def free_address(self) -> str:
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
                return StepStats(
                    policy_version=self._version, metrics={}, num_trajectories=2, num_trained_tokens=1, seconds=1.0
                )
            case "load":
                self._version = args[0]._value["policy_version"]
                return attestation(self.name, self._version, digest="d")
            case "record":
                return f"trajectories/step-{args[0]}", "digest"
            case "score_several":
                return [(number, ("columns", {"rewards": (1.0, 0.0), "size_bytes": 1})) for number, _ in args[0]]
            case "summaries":
                return [group_summary(index, rewards=(1.0, 0.0)) for index in range(PER_STEP)]
            case "describe" | "formula":
                return {}

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        if method == "read":
            return ["group"] * PER_STEP
        return [Fetched("bucket"), Fetched({"policy_version": self._version, "digest": "d", "total_bytes": 1})]

    async def stream_batches(self, method: str, tickets: Any, *, deadline_s: float) -> AsyncIterator[tuple[Any, Any]]:
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
    monkeypatch.setattr(storage, "open", slow.call("open", open), raising=False)
    monkeypatch.setattr(storage, "filesystem_of", lambda url: (SlowFiles(), url))
    return slow


@pytest.fixture
def gaps(monkeypatch, slow) -> list[float]:
    """Seconds between the ticks of a clock on the event loop, from the moment when the driver is connected to its scripted actors."""
    found: list[float] = []

    async def tick() -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            found.append(time.monotonic() - before)
            before = time.monotonic()

    @contextlib.asynccontextmanager
    async def connected(address: str | None) -> AsyncIterator[None]:
        async with beside(tick()):
            slow.is_on = True
            yield
            slow.is_on = False

    @contextlib.asynccontextmanager
    async def seats(placement: Any, *, start_s: float) -> AsyncIterator[ScriptedSeats]:
        yield ScriptedSeats()

    monkeypatch.setattr(launch, "connected", connected)
    monkeypatch.setattr(start_up, "seats", seats)
    here = ClusterResources(nodes=(Node(cpus=4.0),))
    monkeypatch.setattr(start_up, "placement_of", lambda config: plan(config, here, needs=()))
    monkeypatch.setattr(actor_specs, "probe_token_ids", lambda config: [1, 2])
    return found


async def test_neither_disk_nor_prompts_are_waited_for_on_the_event_loop(tmp_path: Path, slow, gaps):
    prompts = f"{__name__}:SlowPrompts"
    config = validated(
        {
            "num_steps": NUM_STEPS,
            "model": {"path": str(tmp_path)},
            "prompts": prompts,
            "buffer": {"groups_per_step": PER_STEP, "trajectories_per_group": 2},
            "evaluation": {"prompts": prompts, "num_prompts": 1, "every_steps": 2},
            "checkpoint": {"every_steps": 2},
            "metrics": {"sinks": ["jsonl"]},
        }
    )
    run_dir = RunDirectory(str(tmp_path))
    # One step is in the record, so that it is learned again.
    Ledger(run_dir).append(groups=[0, 1], trajectories="file", trajectories_digest="digest")
    with open_log(config.metrics, directory=run_dir, num_steps=NUM_STEPS) as log:
        await launch._train(config, run_dir, log, interrupted=asyncio.Event(), address=None)
    assert slow.threads.keys() == {"prompt", "look", "read", "create", "open", "sync"}
    assert [name for name, threads in slow.threads.items() if threading.get_ident() in threads] == []
    assert max(gaps) < SLOW_S
    assert [step["policy_version"] for step in run_dir.read_json_lines("metrics.jsonl")] == [1, 2, 3]

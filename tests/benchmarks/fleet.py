"""A simulated fleet: real Ray actors with scripted engines. What the controller costs per group, and whether it stays flat.

A scripted worker sleeps as long as a completion of log-normal length would take and returns a real trajectory batch; dispatch,
streaming, scoring, buffer and staleness bound are the real ones. Every worker is a process of some 150 MB, so that the largest
fleet of a machine is its memory's: FLEET=8,32,128 says which to measure.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psutil
import pyarrow as pa
import ray

from cluster.contracts.config import RunConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.schema import added, columns_of, to_batch
from cluster.contracts.types import ActorKind, Prompt, Scores, Ticket
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.production import Production
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from deploy.cluster_up.seats import Seats
from deploy.cluster_up.wiring import make_scorers, production

SIZES = tuple(int(size) for size in os.environ.get("FLEET", "8,32").split(","))
SECONDS = 30.0
SLOTS = 4
"""Groups that a worker samples at the same time."""
MEAN_S, SIGMA = 2.0, 0.6
"""Of a group, log-normal: its longest completion decides."""
TOKENS = 256
_BYTES_PER_WORKER = 250 * 1024**2


def rows() -> list[dict[str, Any]]:
    """Per size: groups/s against slots that are always busy, controller CPU per group, and growth of the driver's memory."""
    found: list[dict[str, Any]] = []
    cpu_of_first: float | None = None
    for size in SIZES:
        if psutil.virtual_memory().available < size * _BYTES_PER_WORKER:
            found.append({"name": f"fleet of {size}", "value": "not run: its processes do not fit into memory"})
            continue
        measured = asyncio.run(_measure(size))
        cpu_of_first = cpu_of_first or measured["cpu_ms_per_group"]
        found += _rows(size, measured, cpu_of_first)
    return found


def _rows(size: int, measured: dict[str, float], cpu_of_first: float) -> list[dict[str, Any]]:
    ideal = size * SLOTS / MEAN_S
    return [
        {
            "name": f"fleet of {size}: throughput",
            "value": measured["groups_per_s"],
            "unit": "groups/s",
            "baseline": "every slot always busy",
            "baseline_value": ideal,
            "ratio": measured["groups_per_s"] / ideal,
        },
        {
            "name": f"fleet of {size}: controller CPU",
            "value": measured["cpu_ms_per_group"],
            "unit": "ms/group",
            "baseline": f"fleet of {SIZES[0]}",
            "baseline_value": cpu_of_first,
            "ratio": measured["cpu_ms_per_group"] / cpu_of_first,
            "aim": "<= 1.5",
        },
        {
            "name": f"fleet of {size}: growth of driver memory",
            "value": measured["growth_kb_per_group"],
            "unit": "KB/group",
            "aim": "<= 4",
        },
    ]


class ScriptedWorker:
    """Sleeps instead of sampling."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def generate(self, tickets: Sequence[Ticket]) -> AsyncIterator[pa.RecordBatch]:
        tasks = [asyncio.create_task(self._group(ticket)) for ticket in tickets]
        for task in asyncio.as_completed(tasks):
            yield await task

    async def _group(self, ticket: Ticket) -> pa.RecordBatch:
        await asyncio.sleep(random.Random(ticket.seed).lognormvariate(0.0, SIGMA) * MEAN_S / _lognormal_mean())
        return to_batch([partial(_row, ticket, self._name)(sample) for sample in range(ticket.num_trajectories)])


class Scorer:
    """Judges without looking."""

    async def score_several(self, asked: list[tuple[int, Sequence[Scores]]], *batches: pa.RecordBatch) -> list[Any]:
        scored = map(self._score, batches)
        return [(number, (columns, added(columns))) for (number, _), columns in zip(asked, scored, strict=True)]

    def _score(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        size = batch.num_rows
        return columns_of(
            batch,
            reward=[1.0] * size,
            reward_status=["ok"] * size,
            reward_components=[[]] * size,
            reward_message=[None] * size,
        )


def _lognormal_mean() -> float:
    return 2.718281828 ** (SIGMA**2 / 2)


def _row(ticket: Ticket, worker: str, sample: int) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "run_id": "fleet",
        "group_id": ticket.group_id,
        "ticket_index": ticket.index,
        "sample_index": sample,
        "prompt_id": ticket.prompt.prompt_id,
        "prompt_token_ids": [1] * 32,
        "completion_token_ids": [2] * TOKENS,
        "loss_mask": [True] * TOKENS,
        "rollout_logprobs": [-1.0] * TOKENS,
        "policy_versions": [ticket.policy_version] * TOKENS,
        "reward_components": {},
        "finish_reason": "stop",
        "prompt_text": "a prompt",
        "completion_text": "a completion",
        "info": "{}",
        "worker": worker,
        "started_at": now,
        "finished_at": now,
        "seed": sample,
    }


class _Prompts:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=str(index), text="a prompt")


class _Silent:
    def event(self, kind: str, **fields: Any) -> None: ...


async def _measure(size: int) -> dict[str, float]:
    per_group = 4
    config = RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "prompts": "none",
            "buffer": {"groups_per_step": 2 * size, "trajectories_per_group": per_group, "max_off_policy_steps": 4},
            "rollout": {"max_concurrent_sequences": SLOTS * per_group},
            "deterministic": False,
        }
    )
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    os.environ["PYTHONPATH"] = os.getcwd()  # actors on this machine inherit it, and find this file
    await asyncio.to_thread(lambda: ray.init(num_cpus=2, **options))

    async def join(actor: RemoteActor) -> None: ...

    office = TicketOffice(
        source=Mixture.of(_Prompts()),
        seed=0,
        trajectories_per_group=per_group,
        sampling=SamplingConfig(max_tokens=TOKENS),
        num_ahead=2 * size,
    )
    supervisor = Supervisor(config.supervision, _Silent())
    start = Seats({}, start_s=600.0, events=_Silent()).start
    try:
        async with background() as tasks:
            fleet = WorkerPool(
                [_worker(number) for number in range(size)],
                joining=_worker,
                start=start,
                supervisor=supervisor,
                join=join,
                tasks=tasks,
            )
            services = WorkerPool(
                [_service(0)], joining=_service, start=start, supervisor=supervisor, join=join, tasks=tasks
            )
            scorers = make_scorers(
                config,
                start=start,
                spawn=start,
                services=services,
                models={},
                reference=None,
                servers={},
                supervisor=supervisor,
                tasks=tasks,
                keep=lambda verdicts: None,
            )
            rollouts = production(
                config, scorers=scorers, fleet=fleet, supervisor=supervisor, tasks=tasks, office=office
            )
            await rollouts.start()
            while not fleet.is_complete:
                await asyncio.sleep(0.1)
            rollouts.run(tasks)
            return await _run(config, rollouts)
    finally:
        office.close()
        await asyncio.to_thread(ray.shutdown)


def _worker(number: int) -> ActorSpec:
    return _spec(f"rollout-{number}", ActorKind.ROLLOUT_WORKER, "ScriptedWorker", name=f"rollout-{number}")


def _service(number: int) -> ActorSpec:
    return _spec(f"reward-{number}", ActorKind.REWARD_SERVICE, "Scorer")


def _spec(actor: str, kind: ActorKind, factory: str, **arguments: Any) -> ActorSpec:
    path = f"tests.benchmarks.fleet:{factory}"
    return ActorSpec(name=actor, kind=kind, factory=path, arguments=arguments)


async def _run(config: RunConfig, rollouts: Production) -> dict[str, float]:
    """The controller's loop without a learner: whole steps are taken as fast as they come."""
    size = config.buffer.groups_per_step
    buffer = Buffer(groups_per_step=size, max_off_policy_steps=config.buffer.max_off_policy_steps)
    own = psutil.Process()
    version = num_groups = 0
    began, cpu = 0.0, 0.0
    memory: list[tuple[int, int]] = []
    async with rollouts.generating(into=buffer):
        while version < 3 or time.monotonic() - began < SECONDS:
            await buffer.take(size, stall_s=300.0)
            version += 1
            buffer.advance(version)
            if version < 3:  # the pipeline fills
                continue
            if version == 3:
                began, cpu = time.monotonic(), sum(own.cpu_times()[:2])
                continue
            num_groups += size
            memory.append((num_groups, own.memory_info().rss))
    seconds = time.monotonic() - began
    # Of the second half: in the first, caches and connections fill.
    (groups_half, bytes_half), (groups_end, bytes_end) = memory[len(memory) // 2], memory[-1]
    return {
        "groups_per_s": num_groups / seconds,
        "cpu_ms_per_group": 1000 * (sum(own.cpu_times()[:2]) - cpu) / num_groups,
        "growth_kb_per_group": (bytes_end - bytes_half) / 1024 / (groups_end - groups_half),
    }


if __name__ == "__main__":
    print(rows())

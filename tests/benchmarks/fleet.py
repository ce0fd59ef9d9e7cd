"""A simulated fleet: what the driver spends on a group, how late groups come, and whether that stays flat with the fleet.

Real: the driver with its dispatcher, buffer, ticket office, supervisor, worker pool and scorers; a Ray actor call of its own for
every ticket of every worker; the batch of each group in the object store; a reward service; deaths, joins, leaves and stragglers.
Simulated: a worker sleeps instead of sampling, and the judge does not look. `NUM_PROCESSES` processes hold all workers of a fleet, so
that 512 of them fit into a machine: a worker that dies takes those of its process along, as a node does, and one that joins need not start.

CPU is that of the driver's process, Ray's threads in it included; it counts from the third step on. On a machine whose cores the workers
share, throughput is the machine's. FLEET=8,32 says which sizes to measure.
"""

import asyncio
import os
import signal
import statistics
import time
from functools import partial
from typing import Any

import psutil
import ray

from cluster.contracts.config import RunConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import ActorKind, Group, Prompt, sample_seed
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.production import Production
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Start, Supervisor, heartbeats
from cluster.supervision.tasks import background
from cluster.supervision.timesheet import Timesheet
from deploy.cluster_up.seats import Seats
from deploy.cluster_up.wiring import make_scorers, production
from tests.benchmarks._fleet_actors import MEAN_S, PER_GROUP, TOKENS, sampling_s

SIZES = tuple(int(size) for size in os.environ.get("FLEET", "8,32,128,512").split(","))
SECONDS = float(os.environ.get("FLEET_SECONDS", "30"))
SLOTS = 4
"""Groups that a worker samples at the same time."""
SEED = 0
HEAD_OF_LINE_S = 8.0
"""A step that is ready but for stragglers drops them after that."""
BOUND = 8
CHANGE_S = 6.0
"""Between changes of the fleet, in turn: a process dies with its workers; an eighth of the workers leave; as many join."""
IDLE_S = 10.0
NUM_PROCESSES = 8
_BYTES_PER_PROCESS = 300 * 1024**2


def rows() -> list[dict[str, Any]]:
    """Per size: groups/s against slots that are always busy; the driver's CPU per group, its growth, and how late groups come."""
    found: list[dict[str, Any]] = []
    for size in SIZES:
        if psutil.virtual_memory().available < (NUM_PROCESSES + 1) * _BYTES_PER_PROCESS:
            found.append({"name": f"fleet of {size}", "value": "not run: its processes do not fit into memory"})
            continue
        found += _rows(size, asyncio.run(measure(size)))
    cpu = [row for row in found if row["name"].endswith("idle fleet")]
    return [*found, *(_flatness(row, cpu[0]) for row in cpu[1:])]


def _rows(size: int, measured: dict[str, float]) -> list[dict[str, Any]]:
    ideal = size * SLOTS / MEAN_S
    throughput = {
        "name": f"fleet of {size}: throughput",
        "value": measured["groups_per_s"],
        "unit": "groups/s",
        "baseline": "every slot always busy",
        "baseline_value": ideal,
        "ratio": measured["groups_per_s"] / ideal,
    }
    others = [
        ("driver's CPU", "cpu_ms", "ms/group", None),
        ("driver's CPU beyond that of an idle fleet", "own_cpu_ms", "ms/group", "<= 0.5"),
        ("of it in the event loop's thread", "loop_ms", "ms/group", None),
        ("driver's CPU while nobody samples", "idle_ms_per_s", "ms/s", None),
        ("growth of the driver's memory", "growth_kb", "KB/group", "<= 4"),
        ("lateness of a group, median", "late_ms_median", "ms", None),
        ("lateness of a group, 99 of 100", "late_ms_99", "ms", None),
    ]
    return [
        throughput,
        *(
            {"name": f"fleet of {size}: {name}", "value": measured[key], "unit": unit, "aim": aim}
            for name, key, unit, aim in others
        ),
    ]


def _flatness(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{row['name']}, flat",
        "value": row["value"],
        "unit": row["unit"],
        "baseline": first["name"],
        "baseline_value": first["value"],
        "ratio": row["value"] / first["value"],
        "aim": "<= 1.5",
    }


class _Prompts:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=str(index), text="a prompt")


class _Silent:
    def event(self, kind: str, **fields: Any) -> None: ...


class SharedProcess(RemoteActor):
    """A worker in a process that holds others: its end is not theirs."""

    def __init__(self, spec: ActorSpec, process: RemoteActor) -> None:
        super().__init__(spec, process._handle, process.pid, process.node_id)

    async def kill(self) -> None: ...


class Processes:
    """Where workers are, by their numbers."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._living: dict[int, asyncio.Task[RemoteActor]] = {}

    async def start(self, spec: ActorSpec) -> RemoteActor:
        number = int(spec.name.rpartition("-")[2]) % NUM_PROCESSES
        if number not in self._living:
            crowd = _spec(f"crowd-{number}", ActorKind.ROLLOUT_WORKER, "Crowd")
            self._living[number] = asyncio.create_task(self._start(crowd))
        return SharedProcess(spec, await self._living[number])

    async def kill(self, number: int) -> None:
        process = await self._living.pop(number)
        os.kill(process.pid, signal.SIGKILL)


class TimedBuffer(Buffer):
    """Knows when each group would have come if nothing but its sampling took time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.lateness_s: list[float] = []
        self._due: dict[int, float] = {}

    def start(self, limit: int | None = None) -> range:
        started = super().start(limit)
        self._due |= {index: time.monotonic() + sampling_s(sample_seed(SEED, index)) for index in started}
        return started

    def add(self, index: int, group: Group) -> None:
        self.lateness_s.append(time.monotonic() - self._due.pop(index))
        super().add(index, group)

    def drop(self, index: int, **why: Any) -> None:
        self._due.pop(index, None)
        super().drop(index, **why)


async def measure(size: int) -> dict[str, float]:
    """The figures of `_rows` for a fleet of `size` workers."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "prompts": "none",
            "buffer": {
                "groups_per_step": 2 * size,
                "trajectories_per_group": PER_GROUP,
                "max_off_policy_steps": BOUND,
                "max_head_of_line_s": HEAD_OF_LINE_S,
            },
            "rollout": {"max_concurrent_sequences": SLOTS * PER_GROUP},
            "supervision": {"max_restarts": 1000, "backoff_s": 0.1},
            "deterministic": False,
        }
    )
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    os.environ["PYTHONPATH"] = os.getcwd()  # actors on this machine inherit it, and find this file
    await asyncio.to_thread(lambda: ray.init(address="local", num_cpus=2, **options))

    async def join(actor: RemoteActor) -> None: ...

    office = TicketOffice(
        source=Mixture.of(_Prompts()),
        seed=SEED,
        trajectories_per_group=PER_GROUP,
        sampling=SamplingConfig(max_tokens=TOKENS),
        num_ahead=2 * size,
    )
    supervisor = Supervisor(config.supervision, _Silent())
    start = Seats({}, start_s=600.0, events=_Silent()).start
    processes = Processes(start)
    try:
        async with background() as tasks:
            pool = partial(WorkerPool, supervisor=supervisor, join=join, tasks=tasks)
            fleet = pool([_worker(number) for number in range(size)], joining=_worker, start=processes.start)
            services = pool([_service(0)], joining=_service, start=start)
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
                config,
                scorers=scorers,
                fleet=fleet,
                supervisor=supervisor,
                tasks=tasks,
                office=office,
                note_work=Timesheet(lambda lines: None).note_work,
            )
            await rollouts.start()
            while not fleet.is_complete:
                await asyncio.sleep(0.1)
            rollouts.run(tasks)
            living = lambda: [*fleet.workers(), *services.workers()]
            beats = heartbeats(living, supervisor, heal=fleet.replace, report=lambda: None, early=asyncio.Event())
            tasks.create_task(beats)
            idle_share = await _idle_share()
            tasks.create_task(_change(fleet, processes, size))
            measured = await run(config, rollouts)
            own_cpu_ms = measured["cpu_ms"] - 1000 * idle_share / measured["groups_per_s"]
            return {**measured, "own_cpu_ms": own_cpu_ms, "idle_ms_per_s": 1000 * idle_share}
    finally:
        office.close()
        await asyncio.to_thread(ray.shutdown)


async def _idle_share() -> float:
    """Of a core, what the driver takes while nobody samples: Ray's threads and heartbeats."""
    own = psutil.Process()
    began, cpu = time.monotonic(), sum(own.cpu_times()[:2])
    await asyncio.sleep(IDLE_S)
    return (sum(own.cpu_times()[:2]) - cpu) / (time.monotonic() - began)


async def _change(fleet: WorkerPool, processes: Processes, size: int) -> None:
    for number in range(NUM_PROCESSES):
        await asyncio.sleep(CHANGE_S)
        await processes.kill(number)
        await asyncio.sleep(CHANGE_S)
        fleet.want(size - size // 8)
        await asyncio.sleep(CHANGE_S)
        fleet.want(size)


def _worker(number: int) -> ActorSpec:
    return _spec(f"rollout-{number}", ActorKind.ROLLOUT_WORKER, "Crowd")


def _service(number: int) -> ActorSpec:
    return _spec(f"reward-{number}", ActorKind.REWARD_SERVICE, "Judge")


def _spec(actor: str, kind: ActorKind, factory: str) -> ActorSpec:
    return ActorSpec(name=actor, kind=kind, factory=f"tests.benchmarks._fleet_actors:{factory}", arguments={})


async def run(config: RunConfig, rollouts: Production) -> dict[str, float]:
    """The controller's loop without a learner: whole steps are taken as fast as they come."""
    size = config.buffer.groups_per_step
    buffer = TimedBuffer(
        groups_per_step=size,
        max_off_policy_steps=config.buffer.max_off_policy_steps,
        max_head_of_line_s=config.buffer.max_head_of_line_s,
    )
    own = psutil.Process()
    version = num_groups = 0
    began, cpu, loop_s = 0.0, 0.0, 0.0
    memory: list[tuple[int, int]] = []
    async with rollouts.generating(into=buffer):
        while version < 3 or time.monotonic() - began < SECONDS or len(memory) < 2:
            await buffer.take(size, stall_s=300.0)
            version += 1
            buffer.advance(version)
            if version < 3:  # the pipeline fills
                continue
            if version == 3:
                began, cpu, loop_s = time.monotonic(), sum(own.cpu_times()[:2]), time.thread_time()
                buffer.lateness_s.clear()
                continue
            num_groups += size
            memory.append((num_groups, own.memory_info().rss))
    seconds, num_judged = time.monotonic() - began, len(buffer.lateness_s)
    # Of the second half: in the first, caches and connections fill.
    (groups_half, bytes_half), (groups_end, bytes_end) = memory[(len(memory) - 1) // 2], memory[-1]
    late_ms = [1000 * each for each in statistics.quantiles(buffer.lateness_s, n=100)]
    return {
        "groups_per_s": num_judged / seconds,
        "cpu_ms": 1000 * (sum(own.cpu_times()[:2]) - cpu) / num_judged,
        "loop_ms": 1000 * (time.thread_time() - loop_s) / num_judged,
        "growth_kb": (bytes_end - bytes_half) / 1024 / (groups_end - groups_half),
        "late_ms_median": late_ms[49],
        "late_ms_99": late_ms[98],
    }


if __name__ == "__main__":
    print(rows())

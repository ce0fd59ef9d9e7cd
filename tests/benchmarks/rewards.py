"""The reward services on real actors: groups/s of 1, 2 and 4, and the CPU that a trivial judge's group costs driver, service and judge.

Groups of 8, of which 16 wait at a time, are judged by `exact_match`. The baseline calls the judge in a plain loop, on the texts
themselves.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pyarrow as pa
import ray

from actors.reward_service.judgement import find_judge, judge_now
from cluster.contracts.config import SupervisionConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.schema import info_of, summarize
from cluster.contracts.types import ActorKind, Group, Prompt, Ticket
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from deploy.cluster_up.seats import Seats
from tests.unit.actors.batches import batch_of

SIZES = (1, 2, 4)
PER_GROUP = 8
NUM_GROUPS = 600
AT_ONCE = 16
"""Groups that wait to be judged."""


class _Silent:
    def event(self, kind: str, **fields: Any) -> None: ...


def service(*, num_services: int) -> Any:
    from actors.reward_service.service import RewardService

    return RewardService(RewardConfig(num_services=num_services))


def rows() -> Iterator[dict[str, Any]]:
    batch = batch_of(["the answer is 42 " * 20] * PER_GROUP, columns={"answer": "42"})
    plain_ms = _plain_ms(batch)
    for size in SIZES:
        per_s, cpu_ms = asyncio.run(_measure(size, batch))
        whole = {"baseline": "the judge in a plain loop", "baseline_value": plain_ms}
        name = f"rewards, {size} services: "
        yield {"name": f"{name}throughput", "value": per_s, "unit": "groups/s"}
        for who, ms in cpu_ms.items():
            yield {"name": f"{name}CPU of {who}", "value": ms, "unit": "ms/group"}
        total = {"value": sum(cpu_ms.values()), "unit": "ms/group", **whole}
        yield {"name": f"{name}CPU in all", **total} | ({"aim": "<= 2"} if size == 1 else {})


def _plain_ms(batch: pa.RecordBatch) -> float:
    judge = find_judge(Plugin(name="exact_match"))
    began = time.process_time()
    for _ in range(NUM_GROUPS):
        columns = info_of(batch, 0)
        for text in batch["completion_text"].to_pylist():
            judge_now(judge, {"completion": text, "columns": columns})
    return 1e3 * (time.process_time() - began) / NUM_GROUPS


async def _measure(size: int, batch: pa.RecordBatch) -> tuple[float, dict[str, float]]:
    """Groups/s, and milliseconds of CPU that each party takes for a group."""
    os.environ["PYTHONPATH"] = os.getcwd()  # actors on this machine inherit it, and find this file
    await asyncio.to_thread(lambda: ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False))
    supervisor = Supervisor(SupervisionConfig(), _Silent())
    start = Seats({}, start_s=600.0, events=_Silent()).start

    def spec(number: int) -> ActorSpec:
        return ActorSpec(
            name=f"reward-{number}",
            kind=ActorKind.REWARD_SERVICE,
            factory="tests.benchmarks.rewards:service",
            arguments={"num_services": size},
        )

    async def join(actor: RemoteActor) -> None: ...

    try:
        async with background() as tasks:
            pool = WorkerPool(
                [spec(number) for number in range(size)],
                joining=spec,
                start=start,
                supervisor=supervisor,
                join=join,
                tasks=tasks,
            )
            await pool.start()
            scorers = Scorers(
                services=pool,
                models={},
                reference=None,
                suspects=Suspects(max_failures=2, events=_Silent()),
                events=_Silent(),
                tasks=tasks,
                reward=RewardConfig(),
                judging_deadline_s=60.0,
                reference_timeout_s=60.0,
            )
            services = [psutil.Process((await place.ready()).pid) for place in scorers.places()]
            group = Group(pieces=(ray.put(batch),), summary=summarize(batch))
            await _judge(scorers, group, NUM_GROUPS // 4)
            before, began = _cpu_s(services), time.perf_counter()
            await _judge(scorers, group, NUM_GROUPS)
            seconds, after = time.perf_counter() - began, _cpu_s(services)
            return NUM_GROUPS / seconds, {who: 1e3 * (after[who] - before[who]) / NUM_GROUPS for who in after}
    finally:
        await asyncio.to_thread(ray.shutdown)


async def _judge(scorers: Scorers, group: Group, num_groups: int) -> None:
    indices = iter(range(num_groups))

    async def judge() -> None:
        for index in indices:
            assert await scorers.judge(_ticket(index), group) is not None

    await asyncio.gather(*(judge() for _ in range(AT_ONCE)))


def _ticket(index: int) -> Ticket:
    prompt = Prompt(prompt_id=str(index), text="a prompt")
    return Ticket(
        index=index, prompt=prompt, num_trajectories=PER_GROUP, seed=0, policy_version=0, sampling=SamplingConfig()
    )


def _cpu_s(services: Sequence[psutil.Process]) -> dict[str, float]:
    judges = [child for each in services for child in each.children()]
    parties = {"driver": [psutil.Process()], "services": services, "judges": judges}
    return {who: sum(sum(each.cpu_times()[:2]) for each in processes) for who, processes in parties.items()}


if __name__ == "__main__":
    print(*rows(), sep="\n")

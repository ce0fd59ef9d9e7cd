"""Changes the number of rollout workers and reward services: by orders, by the rule of `elastic`, and when nodes announce their end."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.metrics import MetricLog
from cluster.record.run_directory import RunDirectory
from cluster.remote.nodes import draining_nodes
from cluster.supervision.autoscaling import Decision, Fleet, StepLoad, decide, most_loads
from cluster.supervision.tasks import background
from deploy.cluster_up.notices import check_notices, every, tried
from deploy.cluster_up.orders import Order, check, order_of, waiting_orders
from deploy.cluster_up.wiring import Cluster

_POLL_S, _STORE_POLL_S = 1.0, 5.0
"""Seconds between two looks for orders: on a disk, and in an object store, which bills each look."""
_CLUSTER_POLL_S = 1.0
"""Seconds between two questions to Ray's head node about draining nodes."""


def _inputs(decided: Decision, fleet: Fleet) -> dict[str, float | None]:
    """The numbers behind the decision, for its event."""
    return {
        "wait_share": decided.wait_share,
        "idle_share": decided.idle_share,
        "factor": decided.num_workers / fleet.num_workers,
        "join_seconds": fleet.join_seconds,
    }


class Steering:
    """Sets the wanted number of rollout workers and reward services. Deterministic and colocated runs keep their workers: either their
    work or their place is fixed. Reward services may always change: each gives the same rewards."""

    def __init__(self, config: RunConfig, *, cluster: Cluster, run_dir: RunDirectory, log: MetricLog) -> None:
        self._config = config
        self._fleet = cluster.production.fleet
        self._pools = {"rollout_workers": self._fleet, "reward_services": cluster.production.services}
        self._production = cluster.production
        self._learner = cluster.learner
        self._run_dir = run_dir
        self._log = log
        self._loads: deque[StepLoad] = deque(maxlen=most_loads(config.elastic))
        self._num_serving: list[int] = []
        """Serving workers at each look since the last step."""
        self._version = 0

    @contextlib.asynccontextmanager
    async def steering(self) -> AsyncIterator[None]:
        async with background() as tasks:
            poll_s = _POLL_S if self._run_dir.is_local else _STORE_POLL_S
            tasks.create_task(every(poll_s, self._look, log=self._log))
            tasks.create_task(every(_CLUSTER_POLL_S, partial(self._leave_draining_nodes, tasks), log=self._log))
            if not self._config.keeps_its_workers:
                self._log.add(self)
                self._set("rollout_workers", self._config.rollout.num_workers, why="asked for")
            yield

    # A metric sink, for the load of the steps.

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        is_logged_again = version <= self._version
        if is_logged_again or "buffer/learner_wait_s" not in metrics:
            return
        self._version = version
        buffer = self._config.buffer
        seen, self._num_serving = self._num_serving or [self._fleet.num_wanted - self._fleet.num_coming], []
        self._loads.append(
            StepLoad(
                step_seconds=metrics["time/step_s"],
                wait_seconds=metrics["buffer/learner_wait_s"],
                num_workers=fmean(seen),
                idle_share=metrics["rollout/idle_share"],
                is_buffer_full=metrics["buffer/num_ready"] >= buffer.max_off_policy_steps * buffer.groups_per_step > 0,
            )
        )

    def event(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    async def _look(self) -> None:
        self._run_dir.check_claim()
        while order := await asyncio.to_thread(self._asked):
            for actors, number in order.model_dump(exclude_none=True).items():
                check(self._config, actors, number, url=self._run_dir.url)
                self._set(actors, number, why="treadwheel scale")
        if self._config.keeps_its_workers:
            return
        fleet = self._fleet_now()
        self._num_serving.append(fleet.num_workers - fleet.num_coming)
        decided = decide(self._loads, fleet, self._config.elastic)
        self._set("rollout_workers", decided.num_workers, why="elastic", **_inputs(decided, fleet))

    def _fleet_now(self) -> Fleet:
        return Fleet(
            num_workers=self._fleet.num_wanted,
            num_coming=self._fleet.num_coming,
            join_seconds=self._fleet.join_seconds,
            num_steps_left=self._config.num_steps - self._version,
            most_useful=self._config.buffer.most_under_way,
        )

    def _set(self, actors: str, number: int, *, why: str, **inputs: float | None) -> None:
        pool = self._pools[actors]
        if number == pool.num_wanted:
            return
        self._log.event("scale", actors=actors, num_workers=number, before=pool.num_wanted, reason=why, **inputs)
        self._loads.clear()
        pool.want(number)

    def _asked(self) -> Order | None:
        """Removes and returns the first waiting order."""
        if not (waiting := waiting_orders(self._run_dir)):
            return None
        order = self._run_dir.read_text(waiting[0])
        self._run_dir.remove(waiting[0])
        return order_of(order)

    async def _leave_draining_nodes(self, tasks: asyncio.TaskGroup) -> None:
        draining = await draining_nodes()
        check_notices(draining, self._learner.actors(), log=self._log)
        # As a task, so that looks go on: copies may take a minute, and the learner's own node may drain next.
        tasks.create_task(tried(partial(self._production.leave, draining), log=self._log))

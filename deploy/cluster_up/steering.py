"""Changes a run's workers while it runs: `treadwheel scale`, the rule of `elastic`, and nodes that announce that they go away."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, TreadwheelError
from cluster.metrics import MetricLog
from cluster.record.run_directory import RunDirectory
from cluster.remote.nodes import draining_nodes
from cluster.supervision.autoscaling import StepLoad, decide, most_loads
from cluster.supervision.tasks import background
from deploy.cluster_up.wiring import Cluster
from deploy.reports.run_info import config_of

CONTROL = "control.json"
_POLL_S = 1.0
"""How often an order is looked for."""
_CLUSTER_POLL_S = 5.0
"""How often Ray's head node is asked which nodes go away."""


class _Order(BaseModel):
    """What control.json asks for."""

    rollout_workers: PositiveInt


def scale(run_dir: RunDirectory, *, rollout_workers: int) -> None:
    """Asks the run's driver for so many workers; it obeys within seconds. Raises ConfigError when it would not, or there is none."""
    if rollout_workers < 1:
        raise ConfigError(f"rollout_workers={rollout_workers}: a run needs at least 1")
    if run_dir.owner() is None:
        raise ConfigError(f"{run_dir.url!r} has no living driver; set rollout.num_workers and start the run")
    config = config_of(run_dir)
    if config.deterministic:
        raise ConfigError(
            f"rollout_workers={rollout_workers}: {run_dir.url!r} is deterministic, which worker samples what is fixed; "
            "start a run of its own with another rollout.num_workers, or with deterministic=false"
        )
    if config.recorded is not None:
        raise ConfigError(
            f"rollout_workers={rollout_workers}: {run_dir.url!r} learns from recorded={config.recorded!r} and samples nothing; "
            "only a run of `treadwheel train` has rollout workers"
        )
    elastic = config.elastic
    if elastic.max_workers is not None and not elastic.min_workers <= rollout_workers <= elastic.max_workers:
        raise ConfigError(
            f"rollout_workers={rollout_workers} is outside what {run_dir.url!r} keeps to, elastic.min_workers={elastic.min_workers} to "
            f"elastic.max_workers={elastic.max_workers}; ask for a number between them, or start the run again with other bounds"
        )
    run_dir.write_json(CONTROL, _Order(rollout_workers=rollout_workers).model_dump())


class Steering:
    """Watches, and tells the fleet how many workers to have. Deterministic runs keep theirs: which worker samples what is fixed."""

    def __init__(self, config: RunConfig, *, cluster: Cluster, run_dir: RunDirectory, log: MetricLog) -> None:
        self._config = config
        self._fleet = cluster.production.fleet
        self._supervisor = cluster.supervisor
        self._run_dir = run_dir
        self._log = log
        self._loads: deque[StepLoad] = deque(maxlen=most_loads(config.elastic))
        self._drained: set[tuple[str, str]] = set()
        self._num_coming = 0

    @contextlib.asynccontextmanager
    async def steering(self) -> AsyncIterator[None]:
        if self._config.deterministic:
            yield
            return
        self._log.add(self)
        self._set(self._config.rollout.num_workers, why="asked for")
        async with background() as tasks:
            tasks.create_task(self._every(_POLL_S, self._look))
            tasks.create_task(self._every(_CLUSTER_POLL_S, self._leave_draining_nodes))
            yield

    # A metric sink: what the steps say.

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        if "buffer/learner_wait_s" not in metrics:
            return
        buffer = self._config.buffer
        self._loads.append(
            StepLoad(
                step_seconds=metrics["time/step_s"],
                wait_seconds=metrics["buffer/learner_wait_s"],
                is_buffer_full=metrics["buffer/num_ready"] >= buffer.max_off_policy_steps * buffer.groups_per_step > 0,
            )
        )

    def event(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    async def _every(self, seconds: float, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await look()
            except TreadwheelError as error:  # a look that failed is taken again: the run does not hang on it
                self._log.event("steering_failed", reason=f"{type(error).__name__}: {error}")

    async def _look(self) -> None:
        if (asked := await asyncio.to_thread(self._asked)) is not None:
            self._set(asked, why="treadwheel scale")
        wanted, num_coming = self._fleet.num_wanted, self._fleet.num_coming
        if num_coming < self._num_coming:
            self._loads.clear()  # with the one that came a step takes another time
        self._num_coming = num_coming
        wanted = decide(self._loads, num_workers=wanted, num_coming=num_coming, config=self._config.elastic)
        self._set(wanted, why="elastic")

    def _set(self, num_workers: int, *, why: str) -> None:
        if num_workers == self._fleet.num_wanted:
            return
        self._log.event("scale", num_workers=num_workers, before=self._fleet.num_wanted, reason=why)
        self._loads.clear()
        self._fleet.want(num_workers)

    def _asked(self) -> int | None:
        if not self._run_dir.exists(CONTROL):
            return None
        order = self._run_dir.read_text(CONTROL)
        self._run_dir.remove(CONTROL)
        try:
            return _Order.model_validate_json(order).rollout_workers
        except ValidationError as error:
            raise ConfigError(
                f"{CONTROL}={order!r} is not an order; use `treadwheel scale RUN_DIR rollout_workers=4`"
            ) from error

    async def _leave_draining_nodes(self) -> None:
        """Workers on a node that announced its end finish what they have; others start elsewhere in their place."""
        draining = await draining_nodes()
        self._drained = {(name, node_id) for name, node_id in self._drained if node_id in draining}
        for actor in self._fleet.workers():
            place = (actor.name, actor.node_id)  # one that died and came up elsewhere may have to leave again
            if actor.node_id in draining and place not in self._drained:
                self._drained.add(place)
                self._supervisor.note_leaving(actor)
                self._fleet.drain(actor.name)

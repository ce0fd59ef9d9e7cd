"""Changes how many workers and reward services a run has: `treadwheel scale`, the rule of `elastic`, and nodes that announce that they
go away."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

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
SETTINGS = {"rollout_workers": "rollout.num_workers", "reward_services": "reward.num_services"}
"""What an order may change, and the setting that a run starts with."""


class _Order(BaseModel):
    """What control.json asks for; None leaves a number as it is."""

    model_config = ConfigDict(extra="forbid")

    rollout_workers: PositiveInt | None = None
    reward_services: PositiveInt | None = None


def scale(run_dir: RunDirectory, *, actors: str, number: int) -> None:
    """Asks the run's driver for so many of `actors`, a name in `SETTINGS`; it obeys within seconds. Raises ConfigError when it would not,
    or there is none."""
    if run_dir.owner() is None:
        raise ConfigError(f"{run_dir.url!r} has no living driver; set {SETTINGS[actors]} and start the run")
    _check(config_of(run_dir), actors, number, url=run_dir.url)
    waiting = _order_of(run_dir.read_text(CONTROL)) if run_dir.exists(CONTROL) else _Order()
    run_dir.write_json(CONTROL, waiting.model_copy(update={actors: number}).model_dump(exclude_none=True))


def _check(config: RunConfig, actors: str, number: int, *, url: str) -> None:
    """Raises ConfigError when the run at `url` would not have so many."""
    asked = f"{actors}={number}"
    if number < 1:
        raise ConfigError(f"{asked}: a run needs at least 1; ask for 1 or more")
    if config.recorded is not None:
        raise ConfigError(
            f"{asked}: {url!r} learns from recorded={config.recorded!r}, samples and judges nothing; "
            "only a run of `treadwheel train` has rollout workers and reward services"
        )
    if actors == "reward_services":
        return
    if config.deterministic:
        raise ConfigError(
            f"{asked}: {url!r} is deterministic, which worker samples what is fixed; "
            "start a run of its own with another rollout.num_workers, or with deterministic=false"
        )
    elastic = config.elastic
    if elastic.max_workers is not None and not elastic.min_workers <= number <= elastic.max_workers:
        raise ConfigError(
            f"{asked} is outside what {url!r} keeps to, elastic.min_workers={elastic.min_workers} to "
            f"elastic.max_workers={elastic.max_workers}; ask for a number between them, or start the run again with other bounds"
        )


def _order_of(text: str) -> _Order:
    try:
        return _Order.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{CONTROL}={text!r} is not an order; use `treadwheel scale RUN_DIR rollout_workers=4`"
        ) from error


class Steering:
    """Watches, and tells the fleet and the reward services how many to be. Deterministic runs keep their workers: which worker samples
    what is fixed. A reward is the same whichever service judges."""

    def __init__(self, config: RunConfig, *, cluster: Cluster, run_dir: RunDirectory, log: MetricLog) -> None:
        self._config = config
        self._fleet = cluster.production.fleet
        self._pools = {"rollout_workers": self._fleet, "reward_services": cluster.production.services}
        self._supervisor = cluster.supervisor
        self._run_dir = run_dir
        self._log = log
        self._loads: deque[StepLoad] = deque(maxlen=most_loads(config.elastic))
        self._drained: set[tuple[str, str]] = set()
        self._num_coming = 0

    @contextlib.asynccontextmanager
    async def steering(self) -> AsyncIterator[None]:
        async with background() as tasks:
            tasks.create_task(self._every(_POLL_S, self._look))
            if not self._config.deterministic:
                self._log.add(self)
                self._set("rollout_workers", self._config.rollout.num_workers, why="asked for")
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
        order = await asyncio.to_thread(self._asked)
        for actors, number in order.model_dump(exclude_none=True).items():
            _check(self._config, actors, number, url=self._run_dir.url)
            self._set(actors, number, why="treadwheel scale")
        if self._config.deterministic:
            return
        wanted, num_coming = self._fleet.num_wanted, self._fleet.num_coming
        if num_coming < self._num_coming:
            self._loads.clear()  # with the one that came a step takes another time
        self._num_coming = num_coming
        wanted = decide(self._loads, num_workers=wanted, num_coming=num_coming, config=self._config.elastic)
        self._set("rollout_workers", wanted, why="elastic")

    def _set(self, actors: str, number: int, *, why: str) -> None:
        pool = self._pools[actors]
        if number == pool.num_wanted:
            return
        self._log.event("scale", actors=actors, num_workers=number, before=pool.num_wanted, reason=why)
        self._loads.clear()
        pool.want(number)

    def _asked(self) -> _Order:
        if not self._run_dir.exists(CONTROL):
            return _Order()
        order = self._run_dir.read_text(CONTROL)
        self._run_dir.remove(CONTROL)
        return _order_of(order)

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

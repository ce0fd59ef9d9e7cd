"""Orders to a living run: `treadwheel scale` writes them to the run directory, and the run's driver obeys. Only light imports, so that the
command answers at once while the run uses all cores."""

import time
import uuid

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.settings import MOST_ACTORS, NumActors
from cluster.record.run_directory import RunDirectory
from cluster.supervision.autoscaling import most_workers
from deploy.reports.run_info import config_of

_ORDER, _SUFFIX = "order-", ".json"
"""Names of files in the run directory. Each order is its own file, which the driver removes: no order replaces another."""
SETTINGS = {"rollout_workers": "rollout.num_workers", "reward_services": "reward.num_services"}
"""Actors that an order may change, and the setting with their number at the start."""


class Order(BaseModel):
    """Content of an order's file. None leaves a number unchanged."""

    model_config = ConfigDict(extra="forbid")

    rollout_workers: NumActors | None = None
    reward_services: NumActors | None = None


def scale(run_dir: RunDirectory, *, actors: str, number: int) -> None:
    """Asks the run's driver for `number` of `actors`, a name in `SETTINGS`; it obeys within seconds. Raises ConfigError if it would refuse,
    or if the run has no driver."""
    config = config_of(run_dir)
    if run_dir.owner() is None:
        raise ConfigError(f"{run_dir.url!r} has no living driver; set {SETTINGS[actors]} and start the run")
    check(config, actors, number, url=run_dir.url)
    run_dir.write_json(f"{_ORDER}{time.time_ns()}-{uuid.uuid4().hex[:8]}{_SUFFIX}", {actors: number})


def waiting_orders(run_dir: RunDirectory) -> list[str]:
    """Names of their files, oldest first."""
    return [name for name in run_dir.names() if name.startswith(_ORDER) and name.endswith(_SUFFIX)]


def check(config: RunConfig, actors: str, number: int, *, url: str) -> None:
    """Raises ConfigError if the run at `url` would refuse `number` of `actors`."""
    asked = f"{actors}={number}"
    if number < 1:
        raise ConfigError(f"{asked}: a run needs at least 1; ask for 1 or more")
    if number > MOST_ACTORS:
        raise ConfigError(f"{asked}: a run has at most {MOST_ACTORS}; ask for fewer")
    if config.recorded is not None:
        raise ConfigError(
            f"{asked}: {url!r} learns from recorded={config.recorded!r}, samples and judges nothing; "
            "only a run of `treadwheel train` has rollout workers and reward services"
        )
    if actors == "reward_services":
        return
    if config.deterministic:
        raise ConfigError(
            f"{asked}: {url!r} is deterministic, so the groups of each worker are fixed; "
            "start a run of its own with another rollout.num_workers, or with deterministic=false"
        )
    if config.rollout.colocated:
        raise ConfigError(
            f"{asked}: {url!r} is colocated, with one worker for each of the learner's ranks; "
            "start the run again with rollout.colocated=false, or with more ranks and workers"
        )
    elastic, most_useful = config.elastic, config.buffer.most_under_way
    most = most_workers(elastic, most_useful)
    if most is not None and not elastic.min_workers <= number <= most:
        upper = (
            f"elastic.max_workers={most}"
            if most == elastic.max_workers
            else f"the {most_useful} groups under way at once"
        )
        raise ConfigError(
            f"{asked} is outside the bounds of {url!r}, elastic.min_workers={elastic.min_workers} to {upper}; "
            "ask for a number between them, or start the run again with other bounds"
        )


def order_of(text: str) -> Order:
    try:
        return Order.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{text!r} is not an order; use `treadwheel scale RUN_DIR rollout_workers=4`") from error

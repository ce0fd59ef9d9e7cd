"""The Ray cluster that a run stands on: one that is there already, or a local one for this run alone."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.job_config import JobConfig

from cluster.contracts.errors import ConfigError

_ANSWER_S = 10.0
"""A cluster that does not take a connection within so long is not there; Ray itself would try for many minutes."""


class _Job(JobConfig):
    """A job whose workers do not search the driver's folder before everything else, where a user's `actors.py` would stand for our package.

    `SEARCH_PATH` tells actors where the driver's modules lie.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


@contextlib.asynccontextmanager
async def connected(address: str | None) -> AsyncIterator[None]:
    """The cluster at `address` or RAY_ADDRESS (which `ray job submit` sets), else a local one, ended with this.

    Raises ConfigError for a cluster that does not answer, or refuses us.
    """
    options: dict[str, Any] = {
        "job_config": _Job(),
        "log_to_driver": False,
        "namespace": "treadwheel",
        "logging_level": "error",
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        await _check_answers(address)
    try:
        await asyncio.to_thread(lambda: ray.init(address or "local", **options))
    except ConnectionError as error:
        raise ConfigError(
            f"address={address!r} is no Ray cluster that lets us in: {error}; start one with `ray start --head`, "
            "and where it asks for a token, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"
        ) from error
    # Ray's own handler now stands below ours and would end the process at once, with a stack trace: ours again.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


async def _check_answers(address: str) -> None:
    host, _, port = address.rpartition("://")[2].partition(":")
    if not port.isdecimal():  # `auto`, `local`: Ray knows where
        return
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:  # TimeoutError is one
        raise ConfigError(
            f"address={address!r} does not answer; start a cluster there with `ray start --head`, or leave the address out "
            "(and RAY_ADDRESS unset) for a local one"
        ) from error
    writer.close()

"""Connects a run to its Ray cluster: a running one, or a local one for this run alone."""

import asyncio
import contextlib
import gc
import os
import secrets
import shlex
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import ray
import ray._private.node
import ray._private.utils
import ray.exceptions
from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]  compiled
from ray.job_config import JobConfig

from cluster.contracts.errors import ConfigError, WorkerError
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.remote import forked_worker
from deploy.cluster_up.ahead import RayAhead, named, refuse_second_session
from deploy.cluster_up.ray_folder import made_private
from deploy.reports.provenance import digest_of

_ANSWER_S = 10.0
"""Time limit for a cluster to accept a connection; Ray itself would try for many minutes."""

_TRIES = 3
"""Attempts to start Ray. Each has 30 s, Ray's fixed limit for its first node, which a busy machine may exceed."""

_STARTS_WORKERS_AHEAD = "prestart_worker_first_driver"
"""Ray's setting to start as many workers as the machine has processors when the driver connects. Ray would answer only once all of them
are up, and no thread of the driver would run until then."""

_NICENESS = "RAY_worker_niceness"


class _Job(JobConfig):
    """A job whose workers do not search the driver's folder first, where a user's `actors.py` would hide our package.

    Actors find the driver's modules through `SEARCH_PATH`.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


class _Node(ray._private.node.Node):
    """The first node of our own cluster, on loopback, without processes that serve nobody: the dashboard, for which Ray waits even if it is
    turned off, the autoscaler's monitor, and the log monitor, whose lines the driver does not read. Its workers are forked if there is a
    fork server. Ray has no public setting for any of this."""

    def __init__(self, ray_params: Any, **more: Any) -> None:
        # `ray.init` replaces loopback by an address that other machines reach: its metrics and our process groups ask for no token.
        ray_params.update(node_ip_address="127.0.0.1")
        if forked_worker.ADDRESS in os.environ:
            ray_params.update(setup_worker_path=forked_worker.__file__)
        super().__init__(ray_params, **more)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = ""

    def start_monitor(self) -> None: ...

    def start_log_monitor(self) -> None: ...


@contextlib.asynccontextmanager
async def connected(
    address: str | None, *, run_dir: RunDirectory | None = None, ahead: RayAhead | None = None
) -> AsyncIterator[None]:
    """Connects to the cluster at `address` or RAY_ADDRESS (which `ray job submit` sets). Without either it takes the local cluster that
    `ahead` has begun to start, or starts one, which ends with the block.

    Ray's dashboard shows `run_dir` in the job's metadata. Raises ConfigError for a cluster that does not answer or refuses us, and as
    `refuse_second_session`.
    """
    address = named(address)
    if ahead is None or not ahead.is_coming:
        refuse_second_session()
    if address is not None:
        metadata = await asyncio.to_thread(job_metadata, run_dir) if run_dir else {}
        await _check_answers(address)
        async with _initialized(address, partial(_start, address, metadata)):
            yield
    elif ahead is not None and ahead.is_coming:
        async with _initialized("local", ahead.wait):
            yield
    else:
        with own_cluster():
            async with _initialized("local", start_own):
                yield


@contextlib.contextmanager
def own_cluster() -> Iterator[None]:
    """The block must contain start and end of a local cluster."""
    with _environment_of_own_cluster(), _few_processes():
        yield


def start_own() -> None:
    """Starts a local Ray, without a dashboard. Its processes have process groups of their own: a terminal that closes and `timeout` send
    their signals to the whole group of the driver, which must save before Ray ends."""
    system = {_STARTS_WORKERS_AHEAD: False}
    services.ConsolePopen, plain = _Apart, services.ConsolePopen
    try:
        _start("local", {}, include_dashboard=False, _temp_dir=made_private(), _system_config=system)
    finally:
        services.ConsolePopen = plain


class _Apart(services.ConsolePopen):
    def __init__(self, *command: Any, **more: Any) -> None:
        super().__init__(*command, **more, process_group=0)


def end() -> None:
    """`ray.shutdown`, with a garbage collection before it and none during it: if another thread drops an object ref meanwhile, Ray ends
    the process. Does nothing if Ray has ended already."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


def job_metadata(run_dir: RunDirectory) -> dict[str, str]:
    """The run directory, the command that shows the run, and the digest of its passport, which the run's first driver writes."""
    metadata = {"run_dir": run_dir.path(), "viewer": shlex.join(["treadwheel", "view", run_dir.path()])}
    passport_digest = digest_of(run_dir.read_json(PASSPORT))
    return metadata | ({"passport": passport_digest} if passport_digest else {})


@contextlib.asynccontextmanager
async def _initialized(address: str, initialize: Callable[[], None]) -> AsyncIterator[None]:
    try:
        await _started(initialize)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(
            f"address={address!r} is no Ray cluster that lets us in: {error}; start one with `ray start --head`, "
            "and if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise ConfigError(
            f"address={address!r} runs another version: {' '.join(str(error).split())}; install the same Ray and Python here and there; on "
            "Kubernetes use an image built from this version of treadwheel"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Ray has set its own handler, which would end the process at once, with a stack trace. This sets ours again.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        await _to_its_end(end)


def _start(address: str, metadata: dict[str, str], **more: Any) -> None:
    options: dict[str, Any] = {
        "job_config": _Job(metadata=metadata),
        "log_to_driver": False,
        "namespace": "treadwheel",
        "logging_level": "error",
        **more,
    }
    late: Exception | None = None
    for _ in range(_TRIES):
        try:
            ray.init(address, **options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            end()
            late = error
    raise WorkerError(
        f"Ray did not start on this machine within {_TRIES} times 30 s; end other processes that keep the processors busy, then start "
        "the same command again"
    ) from late


async def _started(initialize: Callable[[], Any]) -> None:
    """Returns when Ray is up. After a cancel it ends Ray as soon as it is up."""
    try:
        await _to_its_end(initialize)
    except asyncio.CancelledError:
        await _to_its_end(end)
        raise


async def _to_its_end(call: Callable[[], Any]) -> None:
    """Calls in a thread, and raises cancels only after the call: a Ray that starts cannot be ended yet, and a Ray that ends needs its
    token."""
    calling = asyncio.ensure_future(asyncio.to_thread(call))
    is_cancelled = False
    while not calling.done():
        try:
            await asyncio.wait({calling})
        except asyncio.CancelledError:
            is_cancelled = True
    error = calling.exception()
    if is_cancelled:
        raise asyncio.CancelledError from error
    if error is not None:
        raise error


@contextlib.contextmanager
def _environment_of_own_cluster() -> Iterator[None]:
    """Sets a token that no other process has, and our own priority for workers: Ray's default is niceness 15, behind all other programs.

    Ray takes both from the environment, which its processes inherit. The block's end restores the environment: a token mode left in this
    process would apply to every later cluster.
    """
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), _NICENESS: os.environ.get(_NICENESS, "0")}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    _read_environment_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _read_environment_again()


@contextlib.contextmanager
def _few_processes() -> Iterator[None]:
    """Starts local nodes as `_Node`, and with the small node agent of a Ray that is installed without its dashboard."""
    node, error = ray._private.node.Node, ray._private.utils.get_dashboard_dependency_error
    ray._private.node.Node = _Node
    ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("left out")
    try:
        yield
    finally:
        ray._private.node.Node, ray._private.utils.get_dashboard_dependency_error = node, error


def _read_environment_again() -> None:
    """Clears Ray's cached copy, by private functions: no public one does. The mode goes first: an ending thread must not miss its token."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


async def _check_answers(address: str) -> None:
    host, _, port = address.rpartition("://")[2].partition(":")
    if ":" not in address and address not in ("auto", "local"):
        raise ConfigError(
            f"address={address!r} is not of the form host:port; write one, or 'auto' for this machine's cluster"
        )
    if not port.isdecimal():  # Ray finds the address
        return
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, OverflowError, UnicodeError) as error:  # or a deadline; a port above 65,535; a name such as a..b
        raise ConfigError(
            f"address={address!r} does not answer; start a cluster there with `ray start --head`, or leave the address out "
            "(and RAY_ADDRESS unset) for a local one"
        ) from error
    writer.close()

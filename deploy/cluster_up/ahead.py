"""Starts a run's own Ray and imports its actors' modules while the run is still checked: each takes seconds."""

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cluster.contracts.errors import ConfigError

if TYPE_CHECKING:
    from cluster.contracts.config import RunConfig  # imports pydantic
    from cluster.remote.fork_server import ForkServer

IMPORTS = ("deploy.cluster_up.factories:import_actors", "deploy.cluster_up.factories:import_engine")
"""Functions for the fork server, which import the actors' modules."""


def named(address: str | None) -> str | None:
    """The running cluster that a run uses: `address`, or else RAY_ADDRESS. None: both are unset or empty, and the run starts its own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def refuse_second_session() -> None:
    """Raises ConfigError if the program has connected to Ray itself: a run would end that connection, and all objects with it."""
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        raise ConfigError(
            "this program is connected to Ray already, and a run makes its own connection; call ray.shutdown() first, or start the run in "
            "another process"
        )


class RayAhead:
    """At most one local Ray; none if the run goes to a cluster at `address` or RAY_ADDRESS. It ends with the block, whether or not a run
    has used it."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._at_the_end = contextlib.ExitStack()
        self._imports = contextlib.ExitStack()
        self._is_importing = False
        self._server: ForkServer | None = None
        self._start: Future[None] | None = None

    def __enter__(self) -> Self:
        """Raises ConfigError as `refuse_second_session`."""
        refuse_second_session()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _deaf_to_ctrl_c():
            self._imports.close()  # first: a starting Ray waits for it
            self._at_the_end.close()

    def import_for(self, config: "RunConfig") -> None:
        """Begins to import the actors' modules in the process from which actors will be forked. Returns at once.

        Does nothing with a torch for GPUs, which a fork breaks, nor for a run that compiles, because torch's compiler is not imported, nor
        if the environment names such a process already.
        """
        from cluster.remote.fork_server import fork_server
        from cluster.remote.forked_worker import ADDRESS

        compiles = config.learner.compile or not config.rollout.enforce_eager
        is_own = named(self._address) is None
        if self._is_importing or ADDRESS in os.environ or compiles or not is_own or not _can_fork():
            return
        self._is_importing = True
        with contextlib.suppress(OSError):  # no socket: Ray starts its workers itself
            self._server = self._imports.enter_context(fork_server(*IMPORTS))

    def ask(self, function: str, question: str) -> Callable[[], str | None]:
        """Asks `function`, an import path, in the importing process. The result waits for the answer; None: there is no such process."""
        if self._server is None:
            return lambda: None
        self._server.ask(function, question)
        return self._server.answer

    def start(self) -> None:
        """Begins to start Ray, and returns at once."""
        if self._start is not None or named(self._address) is not None:
            return
        from deploy.cluster_up import connection  # imports Ray

        # The thread stays: Linux ends Ray's processes with the thread that started them.
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._at_the_end.enter_context(connection.own_cluster())
        self._at_the_end.enter_context(threads)
        self._at_the_end.callback(lambda: threads.submit(connection.end).result())
        self._start = threads.submit(connection.start_own)

    @property
    def is_coming(self) -> bool:
        return self._start is not None

    def wait(self) -> None:
        """Returns when Ray is up. Raises the error of its start."""
        assert self._start is not None
        self._start.result()


def _can_fork() -> bool:
    return sys.platform == "linux" and importlib.metadata.version("torch").endswith("+cpu")


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Ignores Ctrl-C for a moment: a starting Ray cannot be ended, and an ending one needs its token."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What integration tests share: one Ray cluster for all that connect to one, and nothing else.

What a test leaves in pytest's process would reach all later ones. An engine leaves torch's process group and its environment behind:
both are put back when its module ends. Ray leaves settings that nothing puts back: a test that starts it has a process of its own.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cluster.remote.fork_server import fork_server
from cluster.remote.forked_worker import ADDRESS
from deploy.cluster_up.ahead import IMPORTS
from tests.integration.commands import imported_once, run
from tests.integration.ray_head import RayHead, ray_head
from tests.integration.shared import SHARED, shared_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_IS_CHILD = "TREADWHEEL_TEST_IS_CHILD"

_UNTIL = "TREADWHEEL_TEST_UNTIL"
"""A time in seconds since 1970. Long proofs that have not begun by then are skipped, and other tests that have not within the minutes
after it: on a slow machine CI has no time for all of them."""
_MORE_MINUTES = 4

_LONGEST = (
    *("quickstart", "resume", "object_store", "pages", "shows", "spot", "kuberay", "outage", "run_of_ranks", "learn"),
    *(
        "interrupt",
        "faults",
        "ray_cluster",
        "wait_for_nodes",
        "deltas",
        "colocated",
        "weights",
        "reward_parts",
        "viewer",
        "episodes",
    ),
)
"""Long proofs, then tests. They come first, so that two processes, which take a file each, end at nearly the same time; and before all
others those that a machine without time for all must not leave out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)  # before any fixture starts a run
def pytest_runtest_setup(item: pytest.Item) -> None:
    more = 0 if item.get_closest_marker("acceptance") else 60 * _MORE_MINUTES
    if time.time() > float(os.environ.get(_UNTIL, "inf")) + more:
        pytest.skip(f"{_UNTIL} is past: this machine is too slow for all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked `own_process` by a pytest of its own."""
    if pyfuncitem.get_closest_marker("own_process") is None or _IS_CHILD in os.environ:
        return None
    env = {_IS_CHILD: "1", **imported_once()}
    if isinstance(factory := pyfuncitem.funcargs.get("tmp_path_factory"), pytest.TempPathFactory):
        env[SHARED] = str(shared_folder(factory))
    ended = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid, env=env)
    if ended.returncode != 0:
        pytest.fail(ended.stdout + ended.stderr, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def _imports_once() -> Iterator[None]:
    """The actors of most runs are forked of one process, which imports what they need. Each run that is to be hurt has one of its own."""
    with contextlib.nullcontext() if ADDRESS in os.environ else fork_server(*IMPORTS):
        yield


@pytest.fixture(scope="module", autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if state := sys.modules.get("vllm.distributed.parallel_state"):
        # The learner's tests would meet it in torch's one process group.
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
    # What an engine set for itself would reach the commands that later tests run.
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    with ray_head() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from tests.integration.browser import chromium  # few tests need what drives it

    with chromium() as running:
        yield running

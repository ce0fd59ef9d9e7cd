"""What integration tests share: one Ray cluster for all that connect to one, and nothing else.

What a test leaves in pytest's process would reach all later ones. An engine leaves torch's process group and its environment behind:
both are put back when its module ends. Ray leaves settings that nothing puts back: a test that starts it has a process of its own.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
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
_OUTCOMES = "TREADWHEEL_TEST_OUTCOMES"
"""A file for a child that runs several tests: a line of JSON each, with its node id, how it ended, and its failure in words."""

_UNTIL = "TREADWHEEL_TEST_UNTIL"
"""A time in seconds since 1970. Long proofs that have not begun by then are skipped, and other tests that have not within the minutes
after it: on a slow machine CI has no time for all of them."""
_MORE_MINUTES = 4

_LONGEST = (
    *("quickstart", "resume", "object_store", "pages", "shows", "spot", "kuberay", "outage", "run_of_ranks", "learn"),
    *(
        "interrupt",
        "faults",
        "learner_ranks",
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
    """Runs a test marked `own_process` by a pytest of its own; one marked `own_process(together=True)` by one that its file has for all."""
    mark = pyfuncitem.get_closest_marker("own_process")
    if mark is None or _IS_CHILD in os.environ:
        return None
    env: dict[str, str] = {}
    if isinstance(factory := pyfuncitem.funcargs.get("tmp_path_factory"), pytest.TempPathFactory):
        env[SHARED] = str(shared_folder(factory))
    if mark.kwargs.get("together"):
        outcome, failure = _outcomes(pyfuncitem.session, pyfuncitem.path)[pyfuncitem.nodeid]
    else:
        outcome, failure = _run_in_child(pyfuncitem.nodeid, env=env)
    if outcome == "skipped":
        pytest.skip(failure)
    if outcome != "passed":
        pytest.fail(failure, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def _imports_once() -> Iterator[None]:
    """The actors of most runs are forked of one process, which imports what they need. Each run that is to be hurt has one of its own."""
    with contextlib.nullcontext() if ADDRESS in os.environ else fork_server(*IMPORTS):
        yield


def _run_in_child(*nodes: str, env: dict[str, str]) -> tuple[str, str]:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes)
    ended = run(*command, env={_IS_CHILD: "1", **imported_once(), **env})
    well = "skipped" if "1 skipped" in ended.stdout else "passed"
    return well if ended.returncode == 0 else "failed", ended.stdout + ended.stderr


@functools.cache
def _outcomes(session: pytest.Session, path: Path) -> dict[str, tuple[str, str]]:
    """Of all tests of a file that one child runs together: how each ended, and why."""
    together = [item for item in session.items if item.path == path]
    nodes = [item.nodeid for item in together if item.get_closest_marker("own_process")]
    with tempfile.TemporaryDirectory() as folder:
        (told := Path(folder) / "outcomes.jsonl").touch()
        _, said = _run_in_child(*nodes, env={_OUTCOMES: str(told)})
        found = {node: (outcome, words) for node, outcome, words in map(json.loads, told.read_text().splitlines())}
    return {node: found.get(node, ("failed", said)) for node in nodes}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _OUTCOMES in os.environ and (report.when == "call" or not report.passed):
        with open(os.environ[_OUTCOMES], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")


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

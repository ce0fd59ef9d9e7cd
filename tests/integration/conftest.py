"""What integration tests share: one Ray cluster for all that connect to one, and nothing else.

What a test leaves in pytest's process would reach all later ones: engines leave torch's process group behind, Ray its settings, its
token mode and more. So engines end their group with their module, and a test that starts Ray runs in a process of its own.
"""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.integration.commands import run
from tests.integration.ray_head import RayHead, ray_head

_IS_CHILD = "TREADWHEEL_TEST_IS_CHILD"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked `own_process` by a pytest of its own."""
    if pyfuncitem.get_closest_marker("own_process") is None or _IS_CHILD in os.environ:
        return None
    ended = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid, env={_IS_CHILD: "1"})
    if ended.returncode != 0:
        pytest.fail(ended.stdout + ended.stderr, pytrace=False)
    return True


@pytest.fixture(scope="module", autouse=True)
def _vllm_leaves_its_group() -> Iterator[None]:
    """An engine in this process meets itself in torch's one process group, and would keep it from the learner's tests."""
    yield
    if state := sys.modules.get("vllm.distributed.parallel_state"):
        state.destroy_model_parallel()
        state.destroy_distributed_environment()


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    with ray_head() as running:
        yield running

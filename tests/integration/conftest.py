"""One Ray cluster for all tests that submit or connect to one, and one more try for tests whose timing is the machine's.

A second try is reported (`R` in pytest's line, and in its summary). Nothing in a test may depend on it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ray_head import RayHead, ray_head


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes are killed, stopped and started here, on machines that others use too."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1))


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

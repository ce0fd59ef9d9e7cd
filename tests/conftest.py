"""Settings for all tests, and the device that some of them run on: the same test on the CPU, and with the mark `gpu` on a GPU."""

import gc
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

# A busy machine takes long over an example now and then, and over drawing it.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> "torch.device":
    import torch  # few tests need it

    return torch.device(request.param)


@pytest.fixture
def in_a_terminal() -> Iterator[None]:
    """A hang-up is heard, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.hookimpl(trylast=True)  # of those that `-m` leaves
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests for which there are not GPUs enough."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    there = torch.cuda.device_count()
    for item, mark in marked:
        wanted = mark.kwargs.get("count", 1)
        few = f"needs {wanted} GPUs, and torch sees {there}: NCCL takes no GPU twice"
        if there < wanted:
            item.add_marker(pytest.mark.skip(reason=few if there else "needs a GPU, and torch sees none"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: it is not walked meanwhile, nor at each `gc.collect()` of a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()

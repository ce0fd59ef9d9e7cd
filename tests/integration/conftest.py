"""One Ray cluster for all tests that submit or connect to one."""

from collections.abc import Iterator

import pytest

from tests.integration.ray_head import RayHead, ray_head


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    with ray_head() as running:
        yield running

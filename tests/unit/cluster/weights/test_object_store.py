import asyncio

import pytest

from cluster.contracts.errors import DeadlineError
from cluster.weights.object_store import ObjectStoreTransport


class LearnerWhoseNodeIsGone:
    async def publish(self) -> list[asyncio.Future]:
        return [asyncio.get_running_loop().create_future()]


async def test_a_manifest_that_never_comes_meets_the_deadline():
    with pytest.raises(DeadlineError, match="fetching the manifest"):
        await ObjectStoreTransport(timeout_s=0.01).publish(LearnerWhoseNodeIsGone())

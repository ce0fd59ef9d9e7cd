"""What a replay compares is what the run's own transport publishes."""

from collections.abc import Sequence
from typing import Any

from cluster.contracts.config import WeightsConfig
from cluster.contracts.types import BroadcastStats
from deploy.replay import weights_digest


class OwnTransport:
    """A transport by full path, as a user's."""

    def __init__(self, *, timeout_s: float, prefix: str) -> None:
        self._prefix = prefix

    async def broadcast(self, learner: Any, workers: Sequence[Any]) -> BroadcastStats:
        assert not workers
        (published,) = await learner.publish()
        return BroadcastStats(
            policy_version=3,
            digest=f"{self._prefix} {published}",
            size_bytes=1,
            seconds=0.0,
            publish_seconds=0.0,
            attestations=(),
            failures=(),
        )


class Learner:
    async def publish(self) -> list[Any]:
        return ["version 3"]


async def test_a_replay_publishes_through_the_configured_transport():
    config = WeightsConfig.model_validate({"transport": {"name": f"{__name__}:OwnTransport", "prefix": "digest of"}})
    assert await weights_digest(config, Learner()) == "digest of version 3"

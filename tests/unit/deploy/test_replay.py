"""What a replay compares is what the run's own transport publishes."""

from collections.abc import Sequence
from typing import Any

from cluster.contracts.config import WeightsConfig
from cluster.contracts.types import BroadcastStats
from deploy.replay import Replay, weights_digest


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


def test_a_step_that_published_nothing_is_not_called_different():
    """A run that learns without sampling publishes at its start, its end and its checkpoints."""
    unknown = Replay(num_steps=2, digest="a", recorded_digest=None)
    assert (unknown.differs, unknown.verdict) == (False, "the run has no digest of step 2 to compare with")
    equal, other = (Replay(num_steps=2, digest="a", recorded_digest=digest) for digest in "ab")
    assert (equal.differs, equal.verdict) == (False, "equal")
    assert (other.differs, other.verdict) == (True, "not equal: the run published b")

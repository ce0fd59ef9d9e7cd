"""What a replay compares is what the run's own transport publishes."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.contracts.config import WeightsConfig
from cluster.contracts.types import BroadcastStats
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.supervision.placement import ClusterResources, Node
from deploy import replay as replaying
from deploy.cluster_up import start_up
from deploy.config.loading import validated
from deploy.replay import Replay, replay, weights_digest


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


class NoSeats(Exception):
    """Ends the replay where Ray would begin."""


def test_a_replay_asks_for_no_gpu_of_a_reference_that_scored_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    @contextlib.asynccontextmanager
    async def seats(placement, *, start_s, events):
        asked.extend(bundle.name for bundle in placement.bundles)
        raise NoSeats
        yield

    monkeypatch.setattr(replaying, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(start_up, "seats", seats)
    monkeypatch.setattr(start_up, "available", lambda elastic: ClusterResources(nodes=(Node(cpus=4.0),)))
    directory = RunDirectory(str(tmp_path))
    Ledger(directory).append(groups=[0], trajectories="none", trajectories_digest="none")
    values = {
        "model": {"path": "m"},
        "prompts": "file",
        "algorithm": {"kl": {"loss": {"coefficient": 0.04}}},
        "reference": {"gpus": 1},
    }
    with pytest.raises(NoSeats):
        replay(directory, validated(values))
    assert asked == ["learner-0"]

"""What a run says before its actors start."""

import contextlib

import pytest

from cluster.supervision.placement import ClusterResources, Node
from deploy.cluster_up import start_up
from deploy.config.loading import validated
from tests.fakes import ListedEvents


class NoSeats(Exception):
    """Ends the start where Ray would begin."""


@pytest.mark.parametrize(
    ("cpus", "said"), [(2.0, ["fewer CPUs than asked for: actors share them"]), (8.0, [])], ids=["shared", "roomy"]
)
async def test_a_run_whose_actors_share_cpus_says_so(monkeypatch, cpus, said):
    @contextlib.asynccontextmanager
    async def seats(placement, *, start_s):
        raise NoSeats
        yield

    monkeypatch.setattr(start_up, "seats", seats)
    monkeypatch.setattr(start_up, "available", lambda: ClusterResources(nodes=(Node(cpus=cpus),)))
    config = validated({"model": {"path": "some/model"}, "prompts": "file", "learner": {"cpus_per_rank": 2}})
    log = ListedEvents()
    with pytest.raises(NoSeats):
        async with start_up.cluster(config, None, None, log):
            pass
    assert [event["message"] for event in log.events] == said

"""Where a run that waits for nodes is placed, before there is one."""

import pytest

from cluster.contracts.errors import ConfigError
from deploy.config.loading import validated
from deploy.preflight import machine

WAITING = {"model": {"path": "m"}, "prompts": "file", "elastic": {"wait_for_nodes_s": 1800}}


def test_a_run_that_waits_is_placed_on_what_it_asks_for():
    config = validated({**WAITING, "learner": {"gpus_per_rank": 8}})
    placed = machine.place(config, frozenset(), is_local=False)
    assert placed is not None and placed.bundles[0].gpus == 8


def test_a_wait_on_a_cluster_that_no_node_joins_is_refused():
    with pytest.raises(ConfigError, match=r"^elastic\.wait_for_nodes_s=1800: no node joins .*--address"):
        machine.place(validated(WAITING), frozenset(), is_local=True)


def test_a_run_that_learns_from_recorded_trajectories_does_not_wait():
    assert machine.place(validated({**WAITING, "recorded": "runs/a"}), frozenset(), is_local=False) is None
    assert machine.place(validated({**WAITING, "recorded": "runs/a"}), frozenset(), is_local=True) is not None

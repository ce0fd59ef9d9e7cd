"""Whole runs under random schedules: deaths, lost nodes, drains, scaling, failed joins, bad prompts, stragglers."""

import os

import pytest

from cluster.contracts.config import SupervisionConfig
from tests.unit.cluster.simulated_time import run_simulated
from tests.unit.cluster.simulation import PER_GROUP, Nature, World, fates

NUM_SCHEDULES = 1000 if os.environ.get("CI") else 100
_PER_TEST = 50


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, _PER_TEST))
def test_nothing_is_lost_or_doubled_and_the_fleet_converges(first):
    for seed in range(first, first + _PER_TEST):
        world = World(Nature.of(seed))
        run_simulated(world.run())
        check(world)


def check(world: World) -> None:
    nature = world.nature
    seed = nature.seed
    learned, dropped = fates(world)
    num_wanted = nature.num_steps * nature.groups_per_step
    assert len(learned) == num_wanted, f"seed {seed}: every step consumed its groups"
    assert learned == sorted(set(learned)), f"seed {seed}: in start order, none twice"
    assert len(dropped) == len(set(dropped)) and not set(dropped) & set(learned), f"seed {seed}: one fate each"
    # Every group up to the last one learned has a fate: none was lost. (The staleness bound is checked by the loop itself.)
    assert set(range(max(learned) + 1)) == {index for index in {*learned, *dropped} if index <= max(learned)}, seed
    assert world.seen.most_sequences <= nature.max_sequences + PER_GROUP - 1, f"seed {seed}: capacity"
    assert all(count <= SupervisionConfig().max_prompt_failures for count in world.seen.killed_by.values()), (
        f"seed {seed}: tried, then left"
    )
    assert len(world.fleet.serving()) == world.fleet.num_wanted, f"seed {seed}: the fleet is whole"
    assert world.buffer.size_bytes <= 100 * (nature.bound + 1) * nature.groups_per_step, (
        f"seed {seed}: nothing piles up"
    )


def test_a_worker_that_fails_its_canary_is_replaced_and_the_run_goes_on():
    world = World(Nature(seed=3, num_workers=4, num_accidents=1, num_steps=6))
    world.loss_share = 0.2
    run_simulated(world.run())
    refused = [event for event in world.events.events if "off by 3 nats" in event.get("reason", "")]
    assert refused and all(event["kind"] == "failure" and event["decision"] == "restart" for event in refused)
    assert {event["actor"] for event in refused} <= {
        event["actor"] for event in world.events.events if event["kind"] == "recovery"
    }
    check(world)


def test_a_schedule_is_its_seed_alone():
    def events(seed: int) -> list[str]:
        world = World(Nature.of(seed))
        run_simulated(world.run())
        return world.events.kinds()

    assert events(7) == events(7)

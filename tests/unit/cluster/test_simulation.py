"""Whole runs under random schedules: deaths, hangs, lost nodes, drains, scaling, failed starts, bad prompts, stragglers."""

import os
from collections import Counter

import pytest

from cluster.contracts.config import SupervisionConfig
from tests.unit.cluster.nature import NUM_HELD_OUT, PER_GROUP, Nature
from tests.unit.cluster.simulated_time import run_simulated
from tests.unit.cluster.simulation import World

NUM_SCHEDULES = 500 if os.environ.get("CI") else 100
_PER_TEST = 50
_LONGEST_STARVED_S = 10.0
"""An aborted group leaves its worker up to two seconds before its place is free; all else happens at once."""


def simulated_world(nature: Nature) -> World:
    world = World(nature)
    run_simulated(world.run())
    return world


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, _PER_TEST))
def test_nothing_is_lost_doubled_or_starved_and_the_fleet_converges(first):
    for seed in range(first, first + _PER_TEST):
        try:
            check(simulated_world(Nature.of(seed)))
        except BaseException as error:
            error.add_note(f"seed {seed}: {Nature.of(seed)}")
            raise


def check(world: World) -> None:
    """What holds in every schedule. The loop itself checks that no token is older than the bound."""
    nature = world.nature
    learned, dropped = world.fates()
    assert len(learned) == nature.num_steps * nature.groups_per_step, "every step consumed its groups"
    assert learned == sorted(set(learned)), "in start order, none twice"
    assert len(dropped) == len(set(dropped)) and not set(dropped) & set(learned), "one fate each"
    assert {*range(max(learned))} <= {*learned, *dropped}, "none was lost"
    assert world.unfinished() == {}, "nothing piles up"
    assert world.longest_starved_s <= _LONGEST_STARVED_S, "no group waits while a worker has room"
    if nature.is_deterministic:  # its engines queue what is too much
        places = {index: f"rollout-{index % nature.num_workers}" for index in world.sampled_by}
        assert world.sampled_by == places, "the index alone decides the worker"
    else:
        assert world.most_sequences <= nature.max_sequences + PER_GROUP - 1, "capacity"
    assert max(world.num_killed_by.values(), default=0) <= SupervisionConfig().max_prompt_failures, "tried, then left"
    for pool in (world.fleet, world.production.services):
        assert len(pool.serving()) == pool.num_wanted, "the pool is whole"
    check_evaluations(world)
    check_joins(world)


def check_evaluations(world: World) -> None:
    """Before the first step, after each second one and after the last: each held-out prompt has one fate, and all are told."""
    told = {version: numbers for version, numbers in world.events.steps if "eval/num_prompts" in numbers}
    num_steps = world.nature.num_steps
    assert told.keys() == {*range(0, num_steps, 2), num_steps}
    for numbers, held_out in zip(told.values(), world.evaluations.kept, strict=True):
        assert numbers["eval/num_prompts"] + numbers["eval/num_dropped"] == NUM_HELD_OUT
        prompts = [summary.prompt_id for summary in held_out.summaries]
        assert len(prompts) == len(set(prompts)) == numbers["eval/num_prompts"]


def check_joins(world: World) -> None:
    """A worker loads twice at most until it joins or fails: a broadcast overtakes it once."""
    num_loads: Counter[str] = Counter()
    for event in world.events.events:
        if event["kind"] == "attested":
            num_loads[event["actor"]] += 1
        elif event["kind"] in ("worker_joined", "recovery", "failure", "worker_not_joined"):
            num_loads[event["actor"]] = 0
        assert max(num_loads.values(), default=0) <= 2, "no broadcast overtakes it again"


def test_the_bound_is_reached_where_the_learner_is_slow():
    """Sampling takes a second and learning a hundred: each step's groups started as early as the bound allows."""
    for bound in range(4):
        world = simulated_world(
            Nature(seed=bound, bound=bound, num_steps=6, sampling_s=(1.0,), learning_s=(100.0, 100.0))
        )
        check(world)
        oldest = [numbers["staleness/max"] for _, numbers in world.events.steps if "staleness/max" in numbers]
        # The first steps' groups all start at version 0; from then on each step frees places for one more.
        assert oldest == [float(min(step, bound)) for step in range(6)]


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


def test_a_run_whose_workers_leave_all_the_time_loses_and_doubles_nothing():
    """They hand over what they have, or the copy is lost, or they die and hang meanwhile."""
    worlds = [simulated_world(Nature(seed=seed, num_steps=8, bound=2, num_accidents=60)) for seed in range(12)]
    for world in worlds:
        check(world)
    assert sum(world.num_handed_over for world in worlds) > 12


def test_a_schedule_is_its_seed_alone():
    assert simulated_world(Nature.of(7)).events.kinds() == simulated_world(Nature.of(7)).events.kinds()

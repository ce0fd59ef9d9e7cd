"""Which groups train, in a real cluster: chosen among candidates, filtered, and compared with what their prompts earned before."""

from collections import Counter

import pytest

from tests.integration.faults import Run, assert_equal_bit_for_bit, until, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 6
SETTINGS = {
    "num_steps": NUM_STEPS,
    "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 6, "seed": 1},
    "buffer": {"groups_per_step": 3, "trajectories_per_group": 2},
    "rollout__extra_trajectories": 2,
    "checkpoint": {"every_steps": 2},
    "algorithm": {
        "selection": "max_variance",
        "reward_shaping": [{"name": "overlong_penalty", "max_length": 24, "cache": 8, "penalty": 0.5}],
        "filters": ["zero_variance", {"name": "return_bounds", "low": -0.3, "high": 0.3}],
    },
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    return write_run(folder, make_tiny_model(folder / "model"), **SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(run_file, tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("undisturbed-groups") / "run").to_end(run_file)


def test_every_recorded_group_was_chosen_among_all_that_were_judged(undisturbed):
    for step in undisturbed.trajectories().values():
        assert set(Counter(step["group_id"].to_pylist()).values()) == {2}
    chosen = {place for step in undisturbed.trajectories().values() for place in step["sample_index"].to_pylist()}
    assert chosen == {0, 1, 2, 3}, "the extra trajectories are candidates like the others"
    assert all("buffer/candidate_reward" in numbers for numbers in undisturbed.metrics().values())


def test_the_learner_drops_nothing_that_the_cluster_kept(undisturbed):
    dropped = Counter(event["reason"] for event in undisturbed.events("drop"))
    assert dropped and set(dropped) <= {"zero_variance", "return_bounds"}, dropped
    assert {numbers["learner/trajectories_filtered"] for numbers in undisturbed.metrics().values()} == {0.0}
    assert all(numbers["buffer/kept_share"] <= 1 for numbers in undisturbed.metrics().values())


@pytest.mark.acceptance
def test_a_run_that_was_killed_and_resumed_chooses_the_same_and_ends_with_the_same_weights(
    run_file, undisturbed, tmp_path
):
    run = Run(tmp_path / "run")
    with run.start(run_file) as driver:
        until(lambda: run.num_recorded() > max(run.num_steps(), 3), process=driver)
        run.kill_driver()
    resumed = run.to_end(run_file)
    assert_equal_bit_for_bit(undisturbed, resumed, steps=range(1, NUM_STEPS + 1), checkpoint=NUM_STEPS)
    assert resumed.groups() == undisturbed.groups() and resumed.problems() == ()

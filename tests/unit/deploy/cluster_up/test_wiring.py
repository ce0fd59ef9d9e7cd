"""Numbers that follow from a configuration."""

import pytest

from deploy.cluster_up.wiring import judging_deadline_s, wanting_reference
from deploy.config.loading import validated
from learner.algorithms.objective import Objective


def test_judging_may_take_as_long_as_all_that_may_be_queued_before_it_an_evaluation_and_an_outage_included():
    """16 trajectories of a step at 30 s, an outage of 100 s and a minute; 512 held-out completions at 30 s beside them."""
    settings = {
        "model": {"path": "m"},
        "prompts": "file",
        "buffer": {"groups_per_step": 4, "trajectories_per_group": 4},
        "reward": {"timeout_s": 30.0, "hold_s": 100.0},
    }
    assert judging_deadline_s(validated(settings)) == 640.0
    assert validated(settings).stall_s - validated({**settings, "reward": {"hold_s": 0.0}}).stall_s == 100.0
    held_out = {"prompts": "file", "num_prompts": 256, "num_samples": 2, "temperature": 1.0}
    assert judging_deadline_s(validated({**settings, "evaluation": held_out})) == 16_000.0


@pytest.mark.parametrize(
    ("algorithm", "scored"),
    [
        ({"monitor": {"reference_kl": 3}}, [0, 1, 6, 7]),
        ({"kl": {"loss": {"coefficient": 0.1}}}, [*range(10)]),
        ({}, []),
    ],
)
def test_the_reference_scores_the_groups_of_every_third_step_or_of_all(algorithm, scored):
    buffer = {"groups_per_step": 2}
    config = validated({"model": {"path": "m"}, "prompts": "file", "buffer": buffer, "algorithm": algorithm})
    wants = wanting_reference(config, Objective.of_run(config))
    assert [index for index in range(10) if wants(index)] == scored

"""Rewards of several components, by the road that a run takes."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, DataError
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from tests.unit.learner.algorithms.batches import case


def make(**fields) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(fields))


def batch_of(components: list[list[float]], *, rewards: list[float] | None = None) -> BatchTensors:
    """Groups of two trajectories with components `format` and `right`."""
    whole = case(0, num_groups=len(components) // 2, group_size=2).batch
    return dataclasses.replace(
        whole,
        reward_components_NK=tensor(components, dtype=torch.float64),
        rewards_N=whole.rewards_N if rewards is None else tensor(rewards, dtype=torch.float64),
    )


def first_advantages(objective: Objective, batch: BatchTensors) -> Tensor:
    """Of each trajectory's last token."""
    prepared = objective.prepare(batch)
    assert (prepared.advantages_NT[~batch.loss_mask_NT] == 0).all()
    return torch.stack([row[mask][-1] for row, mask in zip(prepared.advantages_NT, batch.loss_mask_NT, strict=True)])


def centred(reward_components_NK: Tensor) -> Tensor:
    return (reward_components_NK - reward_components_NK.mean(0)).sum(1)


def test_a_component_that_one_trajectory_lacks_still_teaches_the_others():
    made = make(advantage={"name": "gdpo", "component_weights": {"right": 1.0, "format": 1.0}, "ddof": 0, "epsilon": 0})
    with_all = batch_of([[0.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert_close(first_advantages(made, with_all), tensor([-1.0, 1.0, 0.0, 0.0]).double() * 2**0.5)
    lacking = batch_of([[0.0, 1.0], [2.0, 1.0], [math.nan, 1.0], [0.0, 1.0]])
    assert_close(first_advantages(made, lacking), tensor([-1.0, 1.0, 0.0, 0.0]).double() * 2**0.5)


def of_run(advantage: Any = "gdpo", **algorithm: Any) -> Objective:
    """Of a run whose `right` counts fully, `format` against the reward, and `style` not at all."""
    weights = {"right": 1.0, "format": -0.5, "style": 0.0}
    parts = {name: {"judge": "exact_match", "weight": weight} for name, weight in weights.items()}
    by_source = {"maths": ["format", "right"], "chat": ["style"]}
    fields = {"reward": {"parts": parts, "by_source": by_source}, "algorithm": {"advantage": advantage} | algorithm}
    return Objective.of_run(RunConfig.model_validate({"model": {"path": "m"}, "prompts": "file", **fields}))


def test_gdpo_weighs_the_parts_of_the_reward_as_the_run_does():
    # `right` is ±1 and `format` the same: -1 + 0.5 and 1 - 0.5, where weights of 1 would reward the format too.
    # In the second group `format` alone differs, and counts against the reward: 0.5 and -0.5.
    batch = batch_of([[0.0, 0.0], [2.0, 2.0], [0.0, 1.0], [2.0, 1.0]])
    made = of_run({"name": "gdpo", "ddof": 0, "epsilon": 0})
    assert_close(first_advantages(made, batch), tensor([-1.0, 1.0, 1.0, -1.0]).double())


def test_a_part_of_weight_0_is_measured_and_teaches_nothing_to_gdpo():
    batch = dataclasses.replace(batch_of([[1.0, 0.0], [1.0, 2.0]]), reward_component_names=("right", "style"))
    assert (first_advantages(of_run(), batch) == 0).all()


def of_environment(advantage: Any = "gdpo", **reward: Any) -> Objective:
    fields = {"environment": "guess", "reward": reward, "algorithm": {"advantage": advantage}}
    return Objective.of_run(RunConfig.model_validate({"model": {"path": "m"}, "prompts": "repeat", **fields}))


def test_gdpo_weighs_what_an_environment_returned_and_what_was_earned_as_the_reward_does():
    # In the first group both are ±1 and stand against each other: 1 - 0.5. In the second one, what was earned alone differs.
    batch = dataclasses.replace(
        batch_of([[2.0, 0.0], [0.0, 2.0], [0.0, 1.0], [2.0, 1.0]]), reward_component_names=("earned", "environment")
    )
    made = of_environment({"name": "gdpo", "ddof": 0, "epsilon": 0}, environment_weight=0.5)
    expected = tensor([0.5, -0.5, -1.0, 1.0]).double() / 0.625**0.5
    assert_close(first_advantages(made, batch), expected)


def test_gdpo_refuses_a_judge_beside_an_environment_that_is_no_part_of_the_reward():
    judge = "tests.unit.actors.judges:obedient"
    with pytest.raises(ConfigError, match=r"reward.judge='.*obedient' beside an environment gives none"):
        of_environment(judge=judge)
    of_environment({"name": "gdpo", "component_weights": {"environment": 1.0}}, judge=judge)
    of_environment(parts={"nice": {"judge": judge}})


def test_a_step_of_one_source_has_not_the_parts_of_the_others():
    weights = {"right": 1.0, "format": 0.0, "style": 1.0}
    made = of_run({"name": "gdpo", "component_weights": weights, "ddof": 0, "epsilon": 0})
    batch = batch_of([[0.0, 0.0], [9.0, 2.0]])
    assert_close(first_advantages(made, batch), tensor([-1.0, 1.0]).double())


STEPS = (
    batch_of([[1.0, 0.0], [3.0, 1.0], [math.nan, 1.0], [math.nan, 0.0]], rewards=[-0.5, -0.5, 1.0, 0.0]),
    dataclasses.replace(
        batch_of([[1.0], [0.25]], rewards=[1.0, 0.25]), reward_component_names=("right",)
    ),  # of a source without `format`
    batch_of([[8.0, 0.0], [4.0, 1.0], [math.nan, 0.0], [math.nan, 1.0]], rewards=[-4.0, -1.0, 0.0, 1.0]),
)
"""Steps of a run whose reward is `right` − `format`/2."""


def normalising_format(**params: Any) -> Objective:
    return of_run("raw_reward", reward_shaping=[{"name": "running_norm", "part": "format", **params}])


@pytest.mark.parametrize(("center", "first", "last"), [(False, (1, 3), (8, 4)), (True, (-1, 1), (4, 0))])
def test_one_part_of_the_reward_has_a_running_scale_of_its_own(center, first, last):
    made = normalising_format(center=center, part_weight=None)  # as a run file with all defaults says it
    expected = (
        [0 - first[0] / 2 / 2**0.5, 1 - first[1] / 2 / 2**0.5, 1, 0],  # 1 and 3: mean 2, variance 2
        [1, 0.25],
        [0 - last[0] / 2 / (26 / 3) ** 0.5, 1 - last[1] / 2 / (26 / 3) ** 0.5, 0, 1],  # 1, 3, 8, 4: mean 4, 26/3
    )
    for batch, rewards in zip(STEPS, expected, strict=True):
        prepared = made.prepare(batch)
        assert_close(prepared.shaped_rewards_N, tensor(rewards, dtype=torch.float64))
        lacks_it = batch.component("format").isnan()
        assert (prepared.shaped_rewards_N[lacks_it] == batch.rewards_N[lacks_it]).all()
        made.adopt(prepared)
    assert made.state_dict()["moments"]["reward_shaping[0]"]["count"] == 4
    assert made.formula()["reward_shaping"][0]["parameters"] == {
        "center": center,
        "part": "format",
        "part_weight": -0.5,
    }


def test_a_resumed_run_goes_on_with_the_scale_of_the_part_and_so_does_a_rank_with_the_rows_in_another_order():
    made, resumed = normalising_format(), normalising_format()
    for step, batch in enumerate(STEPS):
        order = [*reversed(range(len(batch.rewards_N)))]
        whole, turned = made.prepare(batch), resumed.prepare(batch.rows(order))
        assert (whole.shaped_rewards_N[order] == turned.shaped_rewards_N).all(), step
        made.adopt(whole)
        resumed = normalising_format()
        resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert resumed.state_dict() == made.state_dict()


OF_FORMAT = {"name": "running_norm", "part": "format"}


@pytest.mark.parametrize(
    ("shaping", "message"),
    [
        (
            [{**OF_FORMAT, "part": "wrong"}],
            r"\[0\].part='wrong' is no part with a weight; .* right, format$",
        ),
        (
            [{**OF_FORMAT, "part": "style"}],
            r"\[0\].part='style' is no part with a weight; .* right, format$",
        ),
        ([{**OF_FORMAT, "part": ["format"]}], r"\[0\].part=\['format'\] is not valid"),
        (
            [{**OF_FORMAT, "part_weight": 2}],
            r"\[0\].part_weight is that of reward.parts.format, -0.5; leave it out",
        ),
        ([{"name": "running_norm", "part_weight": 2}], r"\[0\].part_weight=2 changes nothing while .*part=None"),
        (["running_norm", OF_FORMAT], r"\[1\].part='format' comes after reward_shaping\[0\]='running_norm', .* before"),
        (
            [{**OF_FORMAT, "part": "right"}, OF_FORMAT, OF_FORMAT],
            r"\[2\].part='format' comes after reward_shaping\[1\]",
        ),
    ],
)
def test_a_part_is_normalised_once_where_its_weight_counts(shaping, message):
    with pytest.raises(ConfigError, match=rf"reward_shaping{message}"):
        of_run("raw_reward", reward_shaping=shaping)


def test_the_only_judge_is_no_part():
    fields = {"model": {"path": "m"}, "prompts": "file", "algorithm": {"reward_shaping": [OF_FORMAT]}}
    with pytest.raises(ConfigError, match=r"part='format' is no part with a weight; .* has: none"):
        Objective.of_run(RunConfig.model_validate(fields))


def test_weights_of_other_parts_than_the_runs_are_refused_at_the_start():
    with pytest.raises(
        ConfigError,
        match=r"component_weights are of wrong, and the parts of the reward are right, format, style; .* leave",
    ):
        of_run({"name": "gdpo", "component_weights": {"wrong": 1.0}})


def test_an_advantage_that_is_not_made_for_missing_components_names_who_lacks_which():
    batch = batch_of([[0.0, 1.0], [2.0, 1.0], [1.0, math.nan], [0.0, 1.0]])
    with pytest.raises(DataError, match=r"trajectory t2 of group g1 lacks the reward component 'right'.*centred"):
        make(advantage=f"{__name__}:centred").prepare(batch)


def test_a_weight_of_no_component_is_refused_and_says_what_there_is():
    with pytest.raises(DataError, match=r"component_weights are of wrong, .* components are format, right"):
        make(advantage={"name": "gdpo", "component_weights": {"wrong": 1.0}}).prepare(
            batch_of([[0.0, 1.0], [2.0, 1.0]])
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_shaping": [{"name": "reward_scale", "factor": 2.0}]}, "not the reward that reward_shaping changes"),
        ({"reward_shaping": [{"name": "running_norm", "part": "right"}]}, "not the reward that reward_shaping changes"),
        (
            {"kl": {"reward": {"coefficient": 0.1, "credit": "trajectory"}}},
            "not the reward that kl.reward.credit='trajectory' changes; let the judge return that change as a component",
        ),
    ],
)
def test_gdpo_refuses_what_acts_on_the_reward_that_it_does_not_read(fields, message):
    with pytest.raises(ConfigError, match=f"advantage='gdpo' reads the judge's components, {message}"):
        make(advantage="gdpo", **fields)


def test_max_rl_refuses_a_kl_that_makes_rewards_of_0_negative_unless_shaping_may_raise_them():
    kl = {"reward": {"coefficient": 0.1, "credit": "trajectory"}}
    with pytest.raises(
        ConfigError, match=r"kl\.reward\.credit='trajectory' makes rewards of 0 negative: max_rl is defined"
    ):
        make(advantage="max_rl", kl=kl).check_rewards()
    shaping = [{"name": "reward_scale", "factor": 1.0, "offset": 10.0}]
    make(advantage="max_rl", kl=kl, reward_shaping=shaping).check_rewards()
    make(advantage="max_rl", kl={"reward": {"coefficient": 0.1, "credit": "to_go"}}).check_rewards()
    make(advantage="pass_at_k", kl=kl).check_rewards()


def test_max_rl_names_the_group_whose_rewards_are_negative():
    batch = batch_of([[0.0, 0.0]] * 4, rewards=[1.0, 0.0, -1.0, -3.0])
    with pytest.raises(DataError, match=r"group g1 \(trajectory t3, t2\): rewards: max_rl is defined for .* got -3"):
        make(advantage="max_rl").prepare(batch)

"""Groups across tickets, through a run's own path."""

import json

import pytest
import torch

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError
from learner.algorithms.objective import Objective
from learner.assemble import assemble
from tests.unit.learner.trajectories import VOCABULARY, make_group


def make(*, advantage="dr_grpo", **streaming) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate({"advantage": advantage, "streaming": streaming}))


def step(objective: Objective, *tickets: tuple[str, list[float]]) -> list[float]:
    """The advantages of a step's trajectories, ticket by ticket; a ticket is a prompt and what its trajectories earn."""
    groups = [
        make_group(index, rewards=rewards, prompt_id=[prompt] * len(rewards))
        for index, (prompt, rewards) in enumerate(tickets)
    ]
    prepared = objective.prepare(assemble(groups, current_version=0, vocabulary_size=VOCABULARY).tensors)
    objective.adopt(prepared)
    return [
        round(row[mask][0].item(), 6) for row, mask in zip(prepared.advantages_NT, prepared.loss_mask_NT, strict=True)
    ]


def test_a_group_of_one_is_compared_with_what_its_prompt_earned_in_earlier_steps():
    objective = make(group_size=3)
    assert step(objective, ("a", [1.0]), ("b", [5.0])) == [0.0, 0.0], "nothing to compare with"
    assert step(objective, ("a", [0.0])) == [-0.5]
    assert step(objective, ("a", [2.0]), ("b", [5.0])) == [1.0, 0.0]
    assert step(objective, ("a", [4.0])) == [2.0], "of 0, 2 and 4: the 1 has left"


def test_a_prompt_that_two_tickets_of_a_step_have_is_one_group():
    assert step(make(group_size=3), ("a", [1.0]), ("b", [7.0]), ("a", [0.0])) == [0.5, 0.0, -0.5]
    assert step(make(group_size=2), ("a", [3.0, 0.0]), ("a", [0.0])) == [2.0, -1.0, -1.0], (
        "all of a step's belong together"
    )


def test_a_full_group_is_forgotten_where_groups_are_not_to_share_a_return():
    objective = make(group_size=2, when_full="clear")
    steps = [step(objective, ("a", [reward])) for reward in (0.0, 2.0, 6.0, 8.0)]
    assert steps == [[0.0], [1.0], [0.0], [1.0]]


def test_any_advantage_of_a_groups_rewards_may_stream():
    objective = make(advantage="rloo", group_size=3)
    step(objective, ("a", [1.0, 0.0]))
    assert step(objective, ("a", [2.0])) == [1.5], "2 less the mean of 1 and 0"


def test_earlier_returns_survive_a_checkpoint():
    whole, first = make(group_size=3), make(group_size=3)
    for objective in (whole, first):
        step(objective, ("a", [0.1]), ("b", [1.0]))
    resumed = make(group_size=3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(3):
        assert step(resumed, ("a", [0.7]), ("b", [0.0])) == step(whole, ("a", [0.7]), ("b", [0.0]))
    assert resumed.state_dict() == whole.state_dict()


def test_a_step_that_is_prepared_twice_counts_once():
    objective = make(group_size=2)
    batch = assemble([make_group(0, rewards=(1.0,))], current_version=0, vocabulary_size=VOCABULARY).tensors
    first, again = objective.prepare(batch), objective.prepare(batch)
    assert torch.equal(first.advantages_NT, again.advantages_NT)


def test_what_cannot_stream_or_has_nothing_to_wait_for_is_refused():
    with pytest.raises(ConfigError, match="streaming with advantage='gdpo'"):
        make(advantage="gdpo")
    with pytest.raises(ConfigError, match=r"streaming\.group_size=8 .*a ticket fills its group alone"):
        make(group_size=8).check_group_size(8, num_candidates=8)
    make(group_size=8).check_group_size(1, num_candidates=1)
    with pytest.raises(ConfigError, match="a group of one is always 0"):
        Objective.from_config(AlgorithmConfig()).check_group_size(1, num_candidates=1)


@pytest.mark.parametrize(
    ("advantage", "size", "message"),
    [
        ("rloo", 1, r"trajectories_per_group=1 with advantage='rloo': .*at least 2 trajectories"),
        ("pass_at_k", 1, r"trajectories_per_group=1 with advantage='pass_at_k': "),
        ({"name": "grpo", "singleton": "error"}, 1, r"trajectories_per_group=1 with advantage='grpo': "),
    ],
)
def test_an_advantage_that_cannot_take_a_prompts_first_ticket_is_refused(advantage, size, message):
    objective = make(advantage=advantage, group_size=8)
    with pytest.raises(ConfigError, match=message):
        objective.check_group_size(size, num_candidates=size)
    objective.check_group_size(4, num_candidates=4)


@pytest.mark.parametrize(
    "parts",
    [
        {"filters": ["zero_variance"]},
        {"filters": ["zero_variance_components"]},
        {"filters": [{"name": "return_bounds", "low": 0.0, "high": 1.0}]},
        {"advantage_shaping": ["group_weights"]},
    ],
)
def test_what_judges_a_ticket_alone_is_refused(parts):
    """Earlier returns of 0 make a ticket of ones teach: its own rewards are equal."""
    with pytest.raises(
        ConfigError, match=r"(filters|advantage_shaping)\[0\]='\w+' with algorithm.streaming: it judges"
    ):
        Objective.from_config(AlgorithmConfig.model_validate({"streaming": {}} | parts))
    Objective.from_config(AlgorithmConfig.model_validate({"streaming": {}, "filters": ["overlong_mask"]}))


def test_a_selection_may_not_choose_what_later_groups_are_compared_with():
    """Of rewards 0, 0, 1 the choice is 0 and 1, whose mean of a half is not what the prompt earns."""
    with pytest.raises(
        ConfigError, match=r"selection='max_variance' with algorithm.streaming: .*leave one of them out"
    ):
        Objective.from_config(AlgorithmConfig.model_validate({"streaming": {}, "selection": "max_variance"}))

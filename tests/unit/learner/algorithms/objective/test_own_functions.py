"""A user's own functions: a result of another shape or type is refused, before the run starts and at its steps, and never broadcast."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError, DataError, FailureKind
from cluster.contracts.schema import summarize
from learner.algorithms.batch_rules.filters import Selection
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.registry.presets import expand
from tests.unit.learner.algorithms.batches import case
from tests.unit.learner.trajectories import make_group


def first_alone(rewards_G: Tensor) -> Tensor:
    return rewards_G[:1]


def as_list(rewards_G: Tensor) -> Any:
    return rewards_G.tolist()


def as_array(rewards_G: Tensor) -> Any:
    return rewards_G.numpy()


def nothing(rewards_G: Tensor) -> Any:
    return None


def mean_of_all(rewards_N: Tensor) -> Tensor:
    return rewards_N.mean(0, keepdim=True)


def first_token_alone(rewards_N: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    return loss_mask_NT[:, :1] * rewards_N[:, None]


def first_shaped(rewards_G: Tensor) -> Tensor:
    return rewards_G[:1]


def scalar_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return (-policy_logprobs_BT * advantages_BT).mean()


def make(**fields) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(expand(fields)))


def own(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def a_batch() -> BatchTensors:
    """Two groups of two trajectories, of up to 6 tokens."""
    whole = case(0, num_groups=2, group_size=2).batch
    return dataclasses.replace(whole, rewards_N=tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("advantage", "got", "wanted"),
    [
        (first_alone, r"a tensor of shape \(1,\)", r"\(4,\)"),
        (as_list, "a value of type list", r"\(4,\)"),
        (as_array, "a value of type ndarray", r"\(4,\)"),
        (nothing, "a value of type NoneType", r"\(4,\)"),
        (mean_of_all, r"a tensor of shape \(1,\)", r"\(16,\)"),
    ],
)
def test_the_check_refuses_an_advantage_that_is_no_tensor_of_the_rewards_shape(advantage, got, wanted):
    """Seen in review: one number for a group of four was broadcast, and the run trained on it without a word."""
    message = f"{advantage.__name__}' returned {got}; it must return a tensor of shape {wanted}"
    with pytest.raises(ConfigError, match=message):
        make(advantage=own(advantage)).check_group_size(4, num_candidates=4)


def over_their_deviation(rewards_G: Tensor) -> Tensor:
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def logarithmic(rewards_G: Tensor) -> Tensor:
    return rewards_G.log()


def test_the_check_refuses_an_advantage_that_is_not_finite_where_rewards_do_not_differ():
    """Such a group would end the run at some step."""
    equal = r"of equal rewards are not finite: \[0.5, 0.5, 0.5, 0.5\] become \[nan, nan, nan, nan\]; return finite ones"
    with pytest.raises(ConfigError, match=equal):
        make(advantage=own(over_their_deviation)).check_group_size(4, num_candidates=4)
    make(advantage=own(over_their_deviation), filters=["zero_variance"]).check_group_size(4, num_candidates=4)
    with pytest.raises(ConfigError, match=r"of rewards are not finite: \[1, 0.5, 0\] become \[0, -0.693, -inf\]"):
        make(advantage=own(logarithmic), filters=["zero_variance"]).check_group_size(3, num_candidates=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": own(first_alone)}, r"group g0 .*shape \(1,\); it must return a tensor of shape \(2,\)"),
        ({"advantage": own(nothing)}, r"group g0 .*type NoneType; it must return a tensor of shape \(2,\)"),
        ({"advantage": own(mean_of_all)}, r"shape \(1,\); it must return a tensor of shape \(4,\) or \(4, 6\)"),
        ({"advantage": own(first_token_alone)}, r"shape \(4, 1\); it must return a tensor of shape \(4,\) or \(4, 6\)"),
        ({"reward_shaping": [own(first_shaped)]}, r"reward_shaping\[0\]=.*shape \(1,\); .* of shape \(2,\)"),
    ],
)
def test_a_step_refuses_a_result_of_another_shape(fields, message):
    with pytest.raises(DataError, match=message):
        make(**fields).prepare(a_batch())


def test_a_micro_batch_refuses_a_loss_that_is_not_per_token():
    objective = make(policy_loss=own(scalar_loss))
    with pytest.raises(DataError, match=r"policy_loss=.* returned a tensor of shape \(\); .* of shape \(9, 6\)"):
        case(0).loss(objective)


def misspelled(rewards_G: Tensor) -> Tensor:
    return rewards_G / undefined_name  # noqa: F821


def misspelled_over_lengths(rewards_G: Tensor, *, completion_lengths_G: Tensor) -> Tensor:
    return rewards_G / undefined_name  # noqa: F821


def misspelled_per_token(token_rewards_NT: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    return token_rewards_NT * undefined_name  # noqa: F821


def misspelled_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return -policy_logprobs_BT * undefined_name  # noqa: F821


def refusing_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    raise ValueError("boom")


def misspelled_filter(rewards_G: Tensor) -> bool:
    return bool(undefined_name)  # noqa: F821


def returns_and_lengths(rewards_N: Tensor, *, loss_mask_NT: Tensor, completion_lengths_N: Tensor) -> Tensor:
    return (rewards_N / completion_lengths_N)[:, None] * loss_mask_NT


def out_of_memory(rewards_G: Tensor) -> Tensor:
    raise torch.OutOfMemoryError


def told(function: Any, error: str) -> str:
    """The error of a function whose only statement raises it."""
    line = function.__code__.co_firstlineno + 1
    return rf"{function.__name__}' raised {error} \(test_own_functions.py, line {line}\)"


_UNDEFINED = "NameError: name 'undefined_name' is not defined"


@pytest.mark.parametrize("advantage", [misspelled, misspelled_over_lengths, misspelled_per_token])
def test_the_check_names_an_advantage_that_raises_an_error_and_its_line(advantage):
    """Seen in review: the check ended with a bare NameError, or passed it, and the learner restarted eight times."""
    with pytest.raises(ConfigError, match=told(advantage, _UNDEFINED)):
        make(advantage=own(advantage)).check_group_size(4, num_candidates=4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (misspelled_loss, told(misspelled_loss, _UNDEFINED)),
        (refusing_loss, told(refusing_loss, "ValueError: boom")),
        (scalar_loss, r"scalar_loss' returned a tensor of shape \(\); it must return a tensor of shape \(2, 3\)"),
    ],
)
def test_the_check_refuses_a_loss_that_fails(loss, message):
    with pytest.raises(ConfigError, match=rf"algorithm.policy_loss=.*{message}"):
        make(policy_loss=own(loss)).check_parts(4)


def test_the_check_takes_functions_that_work():
    make(advantage=own(returns_and_lengths)).check_group_size(4, num_candidates=4)
    make(policy_loss="learner.algorithms.losses.policy:ppo_clip").check_parts(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": own(misspelled)}, rf"group g0 .*{told(misspelled, _UNDEFINED)}"),
        ({"advantage": own(misspelled_per_token)}, told(misspelled_per_token, _UNDEFINED)),
        ({"filters": [own(misspelled_filter)]}, rf"algorithm.filters\[0\]=.*{told(misspelled_filter, _UNDEFINED)}"),
    ],
)
def test_an_error_at_a_step_is_the_datas_and_restarts_nothing(fields, message):
    with pytest.raises(DataError, match=message) as raised:
        make(**fields).prepare(a_batch())
    assert raised.value.kind is FailureKind.REFUSAL


def as_mask(rewards_G: Tensor, *, group_size: int) -> Any:
    return rewards_G >= rewards_G.sort(descending=True).values[group_size - 1]


def too_few(rewards_G: Tensor, *, group_size: int) -> Any:
    return rewards_G.argsort()[1:group_size]


def from_the_end(rewards_G: Tensor, *, group_size: int) -> Any:
    return list(range(-group_size, 0))


def best_twice(rewards_G: Tensor, *, group_size: int) -> Any:
    return [1] * group_size


def its_rewards(rewards_G: Tensor, *, group_size: int) -> Any:
    return rewards_G.sort().values[:group_size]


def none_chosen(rewards_G: Tensor, *, group_size: int) -> Any:
    return None


def values_and_places(rewards_G: Tensor, *, group_size: int) -> Any:
    return rewards_G.topk(group_size)


@pytest.mark.parametrize(
    ("selection", "tried", "chosen"),
    [
        (as_mask, r"\[False, True, True\]", r"\[True, False, True\]"),
        (too_few, r"\[1\]", r"\[2\]"),
        (from_the_end, r"\[-2, -1\]", r"\[-2, -1\]"),
        (best_twice, r"\[1, 1\]", r"\[1, 1\]"),
        (its_rewards, r"\[0.0, 0.5\]", r"\[0.0, 0.5\]"),
        (none_chosen, "None", "None"),
        (values_and_places, r"torch.return_types.topk\(.*\)", r"torch.return_types.topk\(.*\)"),
    ],
)
def test_a_selection_must_return_the_places_of_different_candidates(selection, tried, chosen):
    """Seen in review: the places of a mask of bools are 0 and 1, and a group trained on copies of its first two trajectories."""
    objective = make(selection=own(selection))
    told_so = (
        rf"algorithm.selection=.*{selection.__name__}' returned {{}}; it must return the places of 2 different candidates, "
        "whole numbers from 0 to 2"
    )
    with pytest.raises(ConfigError, match=f"^{told_so.format(tried)}"):
        objective.check_group_size(2, num_candidates=3)
    with pytest.raises(DataError, match=f"^{told_so.format(chosen)}"):
        objective.chosen(summarize(make_group(0, rewards=(1.0, 0.0, 0.5))), group_size=2)


def first_and_last(rewards_G: Tensor, *, group_size: int) -> Any:
    return (0, len(rewards_G) - 1)


def as_places_in_an_array(rewards_G: Tensor, *, group_size: int) -> Any:
    return rewards_G.numpy().argsort()[-group_size:]


@pytest.mark.parametrize(("selection", "places"), [(first_and_last, [0, 2]), (as_places_in_an_array, [0, 2])])
def test_a_selection_may_return_places_in_any_sequence(selection, places):
    objective = make(selection=own(selection))
    objective.check_group_size(2, num_candidates=3)
    assert objective.chosen(summarize(make_group(0, rewards=(1.0, 0.0, 0.5))), group_size=2) == places


def halved_in_place(rewards_N: Tensor) -> Tensor:
    return rewards_N.mul_(0.5)


def centred_in_place(rewards_N: Tensor) -> Tensor:
    return rewards_N.sub_(rewards_N.mean())


def above_half(rewards_N: Tensor) -> Tensor:
    return rewards_N > 0.5


def weighed_in_place(advantages_NT: Tensor, *, columns: dict[str, Tensor], column: str) -> Tensor:
    return advantages_NT.mul_(columns[column].mul_(2.0)[:, None])


def forgetful_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return -policy_logprobs_BT * advantages_BT.mul_(2.0)


def test_a_function_that_changes_its_tensors_in_place_changes_nothing_of_the_batch():
    """Seen in review: shaping in place was lost where turns have rewards, and an advantage in place changed what filters see."""
    last_NT = torch.zeros(4, 6, dtype=torch.float64)
    last_NT[0, 0] = last_NT[2, 0] = 1.0
    turns = dataclasses.replace(a_batch(), token_rewards_NT=last_NT)
    halved = make(advantage="cumulative_returns", reward_shaping=[own(halved_in_place)]).prepare(turns)
    assert halved.batch.token_rewards_NT.sum(1).tolist() == [0.5, 0.0, 0.5, 0.0]
    assert turns.rewards_N.tolist() == [1.0, 0.0, 1.0, 0.0]
    centred = make(advantage=own(centred_in_place), filters=[own(above_half)]).prepare(a_batch())
    assert centred.advantages_NT.sum(1).sign().tolist() == [1.0, -1.0, 1.0, -1.0]
    assert centred.is_kept_N.tolist() == [True, False, True, False]
    weights = {"name": own(weighed_in_place), "column": "difficulty"}
    difficulty = a_batch().columns["difficulty"]
    assert torch.equal(make(advantage_shaping=[weights]).prepare(a_batch()).batch.columns["difficulty"], difficulty)


def test_a_loss_that_changes_its_tensors_in_place_is_the_same_at_each_pass_over_the_rows():
    once, objective = case(0), make(policy_loss=own(forgetful_loss))
    prepared = objective.prepare(once.batch)
    before = prepared.advantages_NT.clone()
    objective.loss(prepared, policy_logprobs_BT=once.policy)
    assert torch.equal(prepared.advantages_NT, before)


def ratio_of_the_sequence(policy_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor) -> Tensor:
    return (policy_logprobs_BT - rollout_logprobs_BT).sum(1).exp()


def in_a_column(proximal_logprobs_NT: Tensor) -> Tensor:
    return proximal_logprobs_NT.exp().mean(1, keepdim=True)


def constant(policy_logprobs_BT: Tensor) -> Any:
    return 1.0


def no_verdict(rewards_G: Tensor) -> Any:
    return None


def for_each(rewards_G: Tensor) -> Any:
    return rewards_G > 0


def mean_as_verdict(rewards_G: Tensor) -> Any:
    return rewards_G.mean()


def as_numbers(completion_lengths_N: Tensor) -> Tensor:
    return (completion_lengths_N > 1).long()


def filter_in_a_column(completion_lengths_N: Tensor) -> Tensor:
    return (completion_lengths_N > 1)[:, None]


def for_all(completion_lengths_N: Tensor) -> Any:
    return True


def halves(entropies_NT: Tensor) -> Any:
    return Selection(entropies_NT > 0.5, entropies_NT)


def mean_alone(loss_mask_NT: Tensor) -> Tensor:
    return 1 / loss_mask_NT.sum()


def mean_advantage(advantages_NT: Tensor) -> Tensor:
    return advantages_NT.mean(1)


def reward_of_all(rewards_N: Tensor) -> Tensor:
    return rewards_N.mean()


_BOOLS = r"a tensor of shape \(4,\) or \(4, 3\) and type torch.bool"


@pytest.mark.parametrize(
    ("field", "function", "got", "wanted"),
    [
        ("corrections", ratio_of_the_sequence, r"a tensor of shape \(2,\)", r"a tensor of shape \(2, 3\)"),
        ("corrections", in_a_column, r"a tensor of shape \(4, 1\)", r"a tensor of shape \(4, 3\)"),
        ("corrections", constant, "a value of type float", r"a tensor of shape \(2, 3\)"),
        ("filters", no_verdict, "a value of type NoneType", "true or false"),
        ("filters", for_each, r"a tensor of shape \(1,\) and type torch.bool", "true or false"),
        ("filters", mean_as_verdict, r"a tensor of shape \(\) and type torch.float64", "true or false"),
        ("filters", as_numbers, r"a tensor of shape \(4,\) and type torch.int64", _BOOLS),
        ("filters", filter_in_a_column, r"a tensor of shape \(4, 1\) and type torch.bool", _BOOLS),
        ("filters", for_all, "a value of type bool", _BOOLS),
        (
            "filters",
            halves,
            r"a tensor of shape \(4, 3\) and type torch.float64",
            r"a tensor of shape \(4, 3\) and type",
        ),
        ("aggregation", mean_alone, r"a tensor of shape \(\)", r"a tensor of shape \(4, 3\)"),
        ("advantage_shaping", mean_advantage, r"a tensor of shape \(4,\)", r"a tensor of shape \(4, 3\)"),
        ("reward_shaping", reward_of_all, r"a tensor of shape \(\)", r"a tensor of shape \(4,\)"),
    ],
)
def test_the_check_refuses_each_part_that_returns_another_type_or_shape(field, function, got, wanted):
    """Groups of one: 4 trajectories of 3 tokens; micro-batches of 2 trajectories."""
    value = own(function) if field == "aggregation" else [own(function)]
    message = rf"^algorithm.{field}.*{function.__name__}' returned {got}; it must return {wanted}"
    with pytest.raises(ConfigError, match=message):
        make(**{field: value}, proximal="recompute").check_parts(1)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (no_verdict, "type NoneType; it must return true or false"),
        (for_each, r"shape \(2,\) and type torch.bool; it must return true or false"),
        (as_numbers, r"type torch.int64; it must return a tensor of shape \(4,\) or \(4, 6\) and type torch.bool"),
        (filter_in_a_column, r"shape \(4, 1\) and type torch.bool; it must"),
        (for_all, "type bool; it must return a tensor"),
        (halves, r"type torch.float64; it must return a tensor of shape \(4, 6\) and type torch.bool"),
    ],
)
def test_a_step_refuses_a_filter_that_is_no_mask(filters, message):
    """Seen in review: None dropped every group, and a column of verdicts about trajectories was taken for one about tokens."""
    with pytest.raises(DataError, match=rf"algorithm.filters\[0\]=.*{message}"):
        make(filters=[own(filters)]).prepare(a_batch())


def test_a_correction_of_trajectories_is_not_spread_over_tokens():
    """Seen in review: a ratio for each of as many trajectories as there are tokens multiplied the tokens."""
    square = case(0, num_groups=2)
    objective = make(corrections=[own(ratio_of_the_sequence)])
    with pytest.raises(DataError, match=r"corrections\[0\]=.* a tensor of shape \(6,\); .* of shape \(6, 6\)"):
        square.loss(objective)


def long_enough(completion_lengths_N: Tensor) -> Tensor:
    return completion_lengths_N > 1


def differing(rewards_G: Tensor) -> Any:
    return rewards_G.max() > rewards_G.min()


def differing_in_numpy(rewards_G: Tensor) -> Any:
    return rewards_G.numpy().max() > rewards_G.numpy().min()


def capped(policy_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor, cap: float = 2.0) -> Tensor:
    return (policy_logprobs_BT - rollout_logprobs_BT).exp().clamp(max=cap)


def near(policy_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor) -> Tensor:
    return (policy_logprobs_BT - rollout_logprobs_BT).abs() < 0.5


def test_filters_and_corrections_of_the_right_shape_are_taken():
    objective = make(
        filters=[own(long_enough), own(differing), own(differing_in_numpy)], corrections=[own(capped), own(near)]
    )
    objective.check_parts(4)
    assert objective.prepare(a_batch()).is_kept_N.all()
    assert case(0).loss(objective)[0].isfinite()


def detached_loss(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return (-policy_logprobs_BT * advantages_BT).detach()


@torch.no_grad()
def loss_in_no_grad(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return -policy_logprobs_BT * advantages_BT


def of_entropies_alone(policy_logprobs_BT: Tensor, *, entropies_BT: Tensor) -> Tensor:
    return -entropies_BT


def over_the_advantage(policy_logprobs_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    return -policy_logprobs_BT / advantages_BT


def over_the_gap(policy_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor) -> Tensor:
    gap_BT = policy_logprobs_BT - rollout_logprobs_BT
    return gap_BT / gap_BT.abs()


@pytest.mark.parametrize("loss", [detached_loss, loss_in_no_grad])
def test_the_check_refuses_a_loss_without_gradient(loss):
    """Seen in review: the check passed it, and the learner restarted eight times."""
    message = rf"policy_loss=.*{loss.__name__}' returned losses without gradient.*compute them from policy_logprobs_BT"
    with pytest.raises(ConfigError, match=message):
        make(policy_loss=own(loss)).check_parts(4)
    make(policy_loss=own(of_entropies_alone)).check_parts(4)


def test_the_check_refuses_losses_and_corrections_that_are_not_finite():
    """Equal log-probs, and advantages of 0, are usual: a run with them ended with the advice to lower its learning rate."""
    with pytest.raises(ConfigError, match=r"policy_loss=.*over_the_advantage' returned inf for finite numbers"):
        make(policy_loss=own(over_the_advantage)).check_parts(4)
    with pytest.raises(ConfigError, match=r"corrections\[0\]=.*over_the_gap' returned nan for finite numbers"):
        make(corrections=[own(over_the_gap)]).check_parts(4)


_TWO, _ONES, _NESTED = np.float32(2.0), torch.ones(1), (1, {"most": float("inf")}, np.float64(2.0), None)


def squashed(rewards_G: Tensor, *, by: Any = torch.tanh) -> Tensor:
    return by(rewards_G - rewards_G.mean())


def scaled(rewards_G: Tensor, *, by: Any = _TWO) -> Tensor:
    return by * (rewards_G - rewards_G.mean())


def moved(rewards_G: Tensor, *, by: Any = _ONES) -> Tensor:
    return rewards_G - by


def limited(rewards_G: Tensor, *, by: Any = _NESTED) -> Tensor:
    return rewards_G


class Scaling:
    def __call__(self, rewards_G: Tensor) -> Tensor:
        return rewards_G


scaling, doubled = Scaling(), functools.partial(limited, by=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (squashed, "is of type builtin_function_or_method"),
        (scaled, "=2.0 is of type float32|=np.float32.2.0. is of type float32"),
        (moved, r"=tensor\(\[1.\]\) is of type Tensor"),
    ],
)
def test_a_default_that_the_passport_cannot_hold_is_refused_with_the_configuration(function, message):
    """Seen in review: the run ended after it had loaded the model."""
    with pytest.raises(ConfigError, match=rf"^advantage.by.*({message}), which passport.json cannot hold; use numbers"):
        make(advantage=own(function))
    assert make(advantage=own(limited)).formula()["advantage"]["parameters"]["by"][0] == 1


def test_a_callable_object_is_refused_and_a_function_with_bound_parameters_is_not():
    with pytest.raises(ConfigError, match=r"advantage='.*:scaling' is an object of class Scaling, .* name a function"):
        make(advantage=f"{__name__}:scaling")
    assert make(advantage=f"{__name__}:doubled").formula()["advantage"]["parameters"] == {"by": 2}


def test_memory_that_runs_out_inside_a_users_function_is_still_told_apart():
    with pytest.raises(torch.OutOfMemoryError):
        make(advantage=own(out_of_memory)).prepare(a_batch())

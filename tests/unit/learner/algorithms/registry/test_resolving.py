"""The algorithm section made whole before it is validated."""

import pytest
from torch import Tensor

from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import PRESETS
from learner.algorithms.registry.resolving import resolved

OVER_LENGTH = {"name": "sequence_sum_over_length", "max_length": 64}


def own_weights(loss_mask_NT: Tensor, *, max_length: int) -> Tensor:
    return loss_mask_NT / max_length


@pytest.mark.parametrize(
    ("raw", "whole"),
    [
        ({"aggregation": "sequence_sum_over_length"}, {"aggregation": OVER_LENGTH}),
        ({"aggregation": {"name": "sequence_sum_over_length"}}, {"aggregation": OVER_LENGTH}),
        ({"value": {"aggregation": "sequence_sum_over_length"}}, {"value": {"aggregation": OVER_LENGTH}}),
        (
            {"reward_shaping": ["reward_clip", {"name": "overlong_penalty", "cache": 8}]},
            {"reward_shaping": ["reward_clip", {"name": "overlong_penalty", "cache": 8, "max_length": 64}]},
        ),
        (
            {"aggregation": f"{__name__}:own_weights"},
            {"aggregation": {"name": f"{__name__}:own_weights", "max_length": 64}},
        ),
    ],
)
def test_a_variant_that_takes_the_longest_completion_gets_it_from_the_sampling(raw, whole):
    assert resolved(raw, max_tokens=64) == whole


@pytest.mark.parametrize(
    "raw",
    [
        {"aggregation": {"name": "sequence_sum_over_length", "max_length": 10}},
        {"aggregation": "token_mean", "policy_loss": {"epsilon_low": 0.1}},
        {"aggregation": "no_such_name", "advantage": "no_such_package.module:name", "filters": 3, "value": "own"},
    ],
)
def test_everything_else_stays_as_it_was_written(raw):
    assert resolved(raw, max_tokens=64) == raw


def test_a_preset_is_filled_in_too():
    assert resolved({"preset": "dr_grpo"}, max_tokens=64)["aggregation"]["max_length"] == 64
    assert "max_length" not in PRESETS["dr_grpo"]["aggregation"]


def test_every_field_that_names_a_variant_has_a_home():
    fields = {
        "advantage",
        "policy_loss",
        "aggregation",
        "reward_shaping",
        "advantage_shaping",
        "filters",
        "selection",
        "corrections",
    }
    assert set(HOMES) == fields | {"value.loss", "value.aggregation"}

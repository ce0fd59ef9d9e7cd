from typing import Any

import numpy as np
import pytest

from actors.returned import to_reward
from cluster.contracts.errors import DataError
from cluster.contracts.types import Reward, RewardStatus


@pytest.mark.parametrize("value", [1, 1.0, True])
def test_a_number_is_a_reward(value):
    assert to_reward(value) == Reward(value=1.0)


def test_a_dict_is_a_reward_and_its_components():
    assert to_reward({"reward": 2, "style": 0.5}) == Reward(value=2.0, components={"style": 0.5})


def test_a_component_may_be_missing():
    assert to_reward({"reward": 2, "style": None}) == Reward(value=2.0, components={"style": None})


def test_a_judge_may_report_its_own_failure():
    said = Reward(value=None, status=RewardStatus.ERROR, message="server down")
    assert to_reward(said) == said


def test_a_status_may_be_text_and_a_message_of_any_length_or_type():
    """Seen before: the reward was lost under the status ok, and the message of a server filled the pipe of all its process's calls."""
    judged: list[Any] = [
        {"value": 1.0, "status": "ok"},
        {"value": None, "status": "error", "message": ValueError("x" * 10**7)},
    ]
    ok, error = (to_reward(Reward(**each)) for each in judged)
    assert ok == Reward(value=1.0)
    assert (error.status, error.message) == (RewardStatus.ERROR, "x" * 500)


def test_half_a_character_in_a_message_or_a_name_is_a_question_mark():
    said = Reward(value=None, status=RewardStatus.ERROR, message="\ud83d")
    assert (to_reward(said).message, to_reward({"reward": 1, "\ud83d": 2}).components) == ("?", {"?": 2.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reward of type NoneType"),
        ("0.5", "reward of type str"),
        ([1.0], "reward of type list"),
        (float("inf"), "not finite: inf"),
        ({"style": 1.0}, "without 'reward', with: style"),
        ({"reward": 1.0, "style": "good"}, "component 'style' of type str"),
        ({"reward": 1.0, "style": float("nan")}, "component 'style' that is not finite"),
        (Reward(value=None), "reward of type NoneType"),
        (10**400, "reward that is no number: int too large"),
        (np.array([1.0, 2.0]), "reward that is no number: only"),
    ],
)
def test_anything_else_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        to_reward(value)

"""What the page promises of judges, tried out."""

import re

import pytest

from actors.returned import to_reward
from cluster.contracts.errors import DataError
from cluster.contracts.types import Reward
from deploy.docs.variants import page

CALL = {"prompt": "1 + 1 =", "completion": " 2", "columns": {"answer": 2}}


def test_the_example_judges():
    defined = {}
    exec(re.findall(r"```python\n(.*?)```", page(), re.DOTALL)[0], defined)
    assert to_reward(defined["judge"](**CALL)) == Reward(value=1.1, components={"right": 1.0, "short": 1.0})


@pytest.mark.parametrize("returned", [0.5, {"reward": 0.5}, Reward(value=0.5)])
def test_a_judge_may_return_a_number_a_dict_or_a_reward(returned):
    assert to_reward(returned).value == 0.5


@pytest.mark.parametrize("returned", ["0.5", None, float("nan"), float("inf"), {"right": 1.0}])
def test_anything_else_is_refused(returned):
    with pytest.raises(DataError):
        to_reward(returned)

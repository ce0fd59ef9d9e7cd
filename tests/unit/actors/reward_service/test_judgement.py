from actors.reward_service.judgement import find_judge
from cluster.contracts.plugins import Plugin


def test_a_judge_with_parameters_bound_is_still_seen_to_be_async():
    assert find_judge(Plugin(name="tests.unit.actors.judges:obedient_async")).is_async
    assert not find_judge(Plugin(name="exact_match", params={"column": "solution"})).is_async

import pytest
from reasoning_gym.factory import DATASETS

from actors.prompts.reasoning_gym import ReasoningGymPrompts, is_held_out
from actors.rewards.reasoning_gym import reasoning_gym
from cluster.contracts.errors import ConfigError, DataError

TWO_DIGIT_SUMS = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
UNSCORABLE_BY_ANSWER = {"boxnet", "composite", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their entries state no answer that their verifier takes, or they need a configuration."""
SLOW = {"futoshiki", "knight_swap"}


def questions(source):
    return {source[index].messages[-1]["content"] for index in range(len(source))}


def test_no_question_is_in_both_splits_however_few_there_are():
    train = questions(ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=2000, seed=0))
    held_out = questions(ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=500, seed=1, split="held_out"))
    assert not train & held_out
    assert not any(map(is_held_out, train)) and all(map(is_held_out, held_out))


def test_seeds_of_the_splits_come_from_different_halves():
    train = ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=1000, seed=2**40)
    held_out = ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=1000, seed=0, split="held_out")
    for attempt in range(200):
        assert 0 <= train._dataset(attempt).seed < 2**30 - 1000
        assert 2**30 <= held_out._dataset(attempt).seed < 2**31 - 1000


def test_another_seed_gives_other_prompts():
    one, other = (ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=50, seed=seed) for seed in (0, 1))
    assert len(questions(one) & questions(other)) < 5


def test_a_prompt_carries_what_its_verifier_needs():
    prompt = ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=1)[0]
    assert prompt.columns["task"] == "chain_sum"
    assert reasoning_gym(prompt="", completion=prompt.columns["answer"], columns=prompt.columns) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(DATASETS) - UNSCORABLE_BY_ANSWER - SLOW))
def test_the_stated_answer_of_every_task_is_right_after_a_trip_through_json(task):
    prompt = ReasoningGymPrompts(task=task, size=2, seed=1)[1]
    assert reasoning_gym(prompt="", completion=prompt.columns["answer"], columns=prompt.columns) == 1.0


def test_a_system_prompt_goes_first():
    prompt = ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=1, system_prompt="Use <answer> tags.")[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_a_task_with_too_few_questions_for_a_split_says_so(monkeypatch):
    monkeypatch.setattr("actors.prompts.reasoning_gym.is_held_out", lambda question: False)
    with pytest.raises(DataError, match=r"'chain_sum' has too few distinct questions .* held-out split"):
        ReasoningGymPrompts(**TWO_DIGIT_SUMS, size=1, split="held_out")[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "chain_sums"}, "task='chain_sums' is not a reasoning_gym task; it has: .*chain_sum"),
        (
            {"task": "chain_sum", "digits": 2},
            "digits=2 is not a parameter of 'chain_sum'; it takes: .*max_digits",
        ),
        ({"task": "chain_sum", "min_terms": 9}, "task='chain_sum' refuses .*max_terms must be >= min_terms"),
        ({"task": "chain_sum", "size": 0}, "size=0"),
        ({"task": "chain_sum", "seed": -1}, "seed=-1 is negative"),
    ],
)
def test_what_cannot_work_is_refused_at_once(params, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymPrompts(**params)

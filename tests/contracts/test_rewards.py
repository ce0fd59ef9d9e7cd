"""What every reward promises; a new file in actors/rewards joins by an example here."""

import json
import threading

import pytest

from actors.prompts.reasoning_gym import ReasoningGymPrompts
from actors.reward_service.judgement import find_judge, judge_now
from cluster.contracts.plugins import REWARDS, Plugin, names
from cluster.contracts.types import RewardStatus

SUM = ReasoningGymPrompts(task="chain_sum", size=1)[0]
EXAMPLES = {
    # name: (parameters, columns, right completion, wrong completion)
    "code_asserts": (
        {"column": "answer"},
        {"answer": ["assert f(2) == 4"]},
        *(f"```\ndef f(x): return {y}\n```" for y in (4, 5)),
    ),
    "code_function": (
        {"column": "answer", "function": "f"},
        {"answer": [{"input": [2], "output": 4}]},
        *(f"```\ndef f(x): return {y}\n```" for y in ("2 * x", "x")),
    ),
    "code_stdin": (
        {"column": "answer"},
        {"answer": [{"input": "2", "output": "4"}]},
        "```\nprint(4)\n```",
        "```\nprint(5)\n```",
    ),
    "exact_match": ({}, {"answer": "42"}, " 42\n", "41"),
    "format": ({}, {}, "<think>Sum.</think>\n<answer>42</answer>", "<think>Sum.</think> 42"),
    "json_schema": ({"schema": {"type": "object"}}, {}, '```json\n{"x": 1}\n```', "[1]"),
    "language_consistency": ({}, {}, "The answer is 42.", "答案是 42"),
    "length": ({"at_most": 3}, {}, "abc", "abcd"),  # a token is a character here
    "math_verify": ({}, {"answer": "\\frac{1}{2}"}, "It is $0.5$.", "It is $0.6$."),
    "multiple_choice": ({}, {"answer": "B"}, "A is tempting, but the answer is (B).", "The answer: A"),
    "reasoning_gym": ({}, SUM.columns, SUM.columns["answer"], "no idea"),
    "regex": ({"pattern": "<answer>(.*?)</answer>", "column": "answer"}, {"answer": "42"}, "<answer>42</answer>", "42"),
}
OTHERS = {
    "code_sandbox_fusion",
    "llm_judge",
    "none",
    "ngram_repetition",
    "openrlhf",
    "pairwise",
    "remote",
    "reward_model",
    "trl",
    "verl",
}
"""Of a server, of no right and wrong completion, or of functions that others write; their own tests are in tests/unit/actors."""
all_rewards = pytest.mark.parametrize("name", [name for name in names(REWARDS) if name not in OTHERS])


def judged(name, completion, columns=None):
    params, own_columns, _, _ = EXAMPLES[name]
    judge = find_judge(Plugin(name=name, params=params))
    assert not judge.is_async, "give the asynchronous ones a loop here"
    given = {
        "prompt": "?",
        "completion": completion,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": completion}],
        "token_ids": [*completion.encode()],
        "finish_reason": "stop",
        "columns": own_columns if columns is None else columns,
    }
    (reward,) = judge_now(judge, {name: given[name] for name in judge.asks})
    return reward


@all_rewards
def test_right_earns_one_and_wrong_nothing(name):
    _, _, right, wrong = EXAMPLES[name]
    assert judged(name, right).value == 1.0
    assert judged(name, wrong).value == 0.0


@all_rewards
def test_an_empty_completion_is_wrong_and_no_error(name):
    assert judged(name, "").value == 0.0


@all_rewards
def test_columns_may_come_from_disk(name):
    _, columns, right, _ = EXAMPLES[name]
    assert judged(name, right, json.loads(json.dumps(columns))).value == 1.0


@pytest.mark.parametrize("name", [name for name, (_, columns, _, _) in EXAMPLES.items() if columns])
def test_a_prompt_without_the_needed_column_is_an_error_that_names_it(name):
    reward = judged(name, "42", {})
    assert reward.status is RewardStatus.ERROR
    assert "DataError" in reward.message and "'answer'" in reward.message


@all_rewards
def test_it_works_away_from_the_main_thread(name):
    """Where alarm signals do not exist, which some verifiers use for their deadlines."""
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(judged(name, EXAMPLES[name][2])))
    thread.start()
    thread.join()
    assert rewards[0].value == 1.0


def test_no_reward_is_zero_whatever_is_said():
    judge = find_judge(Plugin(name="none"))
    given = {"prompt": "?", "columns": {}}
    assert [judge_now(judge, given | {"completion": said})[0].value for said in ("", "42")] == [0.0, 0.0]

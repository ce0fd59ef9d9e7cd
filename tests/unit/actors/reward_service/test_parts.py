"""Rewards of several parts, through the service: each judge in a process of its own."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.reward_service.service import RewardService
from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.schema import added
from tests.unit.actors.batches import batch_of

pytestmark = pytest.mark.slow  # all of it: each judge is a process

PARTS = "tests.unit.actors.parts"


@contextlib.asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[RewardService]:
    made = RewardService(RewardConfig.model_validate(settings))
    try:
        yield made
    finally:
        await made.close()


async def scored(completions, columns=None, **settings):
    async with service(**settings) as rewards:
        return (await rewards.score(batch_of(completions, columns=columns)))[0]


def components(batch):
    return [dict(row) for row in batch["reward_components"].to_pylist()]


async def test_the_reward_is_the_weighted_sum_of_its_parts_which_are_its_components():
    """2 x length + 0.5 x shouting: 2 x 2 + 0.5 and 2 x 3 + 0."""
    parts = {"length": {"judge": f"{PARTS}:length", "weight": 2}, "loud": {"judge": f"{PARTS}:shouting", "weight": 0.5}}
    batch = await scored(["HO", "hum"], parts=parts)
    assert batch["reward"].to_pylist() == [4.5, 6.0]
    assert components(batch) == [{"length": 2.0, "loud": 1.0}, {"length": 3.0, "loud": 0.0}]


@pytest.mark.parametrize("weight", [1, -1e9])
async def test_a_sum_that_is_no_number_is_a_failed_reward(weight):
    """1e308 + 1e308 overflows on the way, and infinity less infinity is nothing."""
    parts = {
        "one": {"judge": f"{PARTS}:huge", "weight": abs(weight)},
        "two": {"judge": f"{PARTS}:huge", "weight": weight},
    }
    batch = await scored(["huge", "hum"], parts=parts)
    assert batch["reward"].to_pylist() == [None, 1 + 1 if weight == 1 else 0]
    assert "the weighted sum of the parts is not finite" in batch["reward_message"][0].as_py()


async def test_a_part_may_judge_the_group_and_may_ask_for_the_rewards_of_others():
    """length 1 and 2; their places 0 and 1; ten times the length; all that and one or two tokens: 1 + 0 + 1 and 2 + 1 + 2."""
    parts = {
        "all": {"judge": f"{PARTS}:everything", "weight": 0.0},
        "tens": f"{PARTS}:others",
        "length": f"{PARTS}:length",
        "rank": f"{PARTS}:rank",
    }
    parts = {name: {"judge": part} if isinstance(part, str) else part for name, part in parts.items()}
    batch = await scored(["a", "bc"], {"answer": "42"}, parts=parts)
    assert batch["reward_message"].to_pylist() == [None, None]
    assert components(batch) == [
        {"all": 2.0, "tens": 10.0, "length": 1.0, "rank": 0.0},
        {"all": 5.0, "tens": 20.0, "length": 2.0, "rank": 1.0},
    ]
    assert batch["reward"].to_pylist() == [11.0, 23.0]


async def test_a_source_has_its_recipe_and_nothing_else_is_computed():
    settings = {
        "parts": {"length": {"judge": f"{PARTS}:length"}, "count": {"judge": f"{PARTS}:Counting"}},
        "by_source": {"long": ["length"], "count": ["count", "length"]},
        "source_column": "kind",
    }
    async with service(**settings) as rewards:
        first, _ = await rewards.score(batch_of(["abc", "d"], columns={"kind": "long"}))
        second, _ = await rewards.score(batch_of(["abc"], columns={"kind": "count"}))
        unknown, _ = await rewards.score(batch_of(["abc"], columns={"kind": "odd"}))
    assert components(first) == [{"length": 3.0}, {"length": 1.0}]
    assert components(second) == [{"length": 3.0, "count": 1.0}], "its first call: it judged no other prompt"
    assert unknown["reward_status"].to_pylist() == ["error"]
    assert unknown["reward_message"][0].as_py() == (
        "recipe DataError: reward.by_source has no entry for the source 'odd' (column 'kind'); it has: long, count"
    )


async def test_a_failed_part_fails_its_trajectory_and_says_so():
    parts = {"length": {"judge": f"{PARTS}:length"}, "picky": {"judge": f"{PARTS}:picky"}}
    batch = await scored(["good", "bad!"], parts=parts)
    assert batch["reward"].to_pylist() == [5.0, None]
    assert components(batch)[1] == {"length": 4.0, "picky": None}
    good, bad = batch["reward_message"].to_pylist()
    assert good is None and bad.startswith("judge:picky ValueError: no opinion (")
    (failure,) = added(batch)["reward_failures"]
    assert (failure.kind, failure.count) == ("judge:picky ValueError", 1)


async def test_a_failed_part_that_may_leave_leaves_for_the_whole_group():
    """Length alone rewards both: 4 and 4. With the part in one of them they would be 5 and 4, though nothing says that one is better."""
    parts = {"length": {"judge": f"{PARTS}:length"}, "picky": {"judge": f"{PARTS}:picky", "on_failure": "part"}}
    batch = await scored(["good", "bad!"], parts=parts)
    assert batch["reward"].to_pylist() == [4.0, 4.0]
    assert components(batch) == [{"length": 4.0, "picky": None}] * 2
    first, second = batch["reward_message"].to_pylist()
    assert first == second and first.startswith("judge:picky left the recipe: ValueError: no opinion (")
    told = added(batch)
    assert told["num_reward_errors"] == 0 and told["reward_failures"][0].kind == "part left"


async def test_a_reward_whose_every_part_left_is_a_failure():
    parts = {"picky": {"judge": f"{PARTS}:picky", "on_failure": "part"}}
    batch = await scored(["good", "bad!"], parts=parts)
    assert batch["reward_status"].to_pylist() == ["error"] * 2


async def test_each_part_has_its_own_deadline():
    hanging = {"judge": f"{PARTS}:of_a_group", "timeout_s": 0.5}
    batch = await scored(["a", "b"], {"do": "hang"}, parts={"slow": hanging, "length": {"judge": f"{PARTS}:length"}})
    assert batch["reward_status"].to_pylist() == ["timeout"] * 2
    assert "judge:slow no reward within reward.parts.slow.timeout_s=0.5" in batch["reward_message"][0].as_py()


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "ValueError: no opinion"),
        ("exit", "exit code 3"),
        ("text", "returned a str for a group; it must be a list of 2 rewards"),
        ("set", "returned a set for a group"),
        ("number", "returned a float for a group"),
        ("short", "returned 1 rewards for a group of 2"),
        ("all none", "no part of the recipe has a verdict"),
    ],
)
async def test_a_judge_of_groups_that_misbehaves_fails_its_group_and_judges_the_next(do, message):
    async with service(judge=f"{PARTS}:of_a_group") as rewards:
        bad, _ = await rewards.score(batch_of(["a", "b"], columns={"do": do}))
        good, _ = await rewards.score(batch_of(["a", "b"], columns={"do": ""}))
    assert bad["reward_status"].to_pylist() == ["error"] * 2
    assert message in bad["reward_message"][0].as_py()
    assert good["reward"].to_pylist() == [1.0, 0.0]


@pytest.mark.parametrize("do", ["nan", "one none"])
async def test_a_single_reward_of_a_group_that_is_no_number_fails_alone(do):
    batch = await scored(["a", "b"], {"do": do}, judge=f"{PARTS}:of_a_group")
    assert batch["reward"].to_pylist() == [1.0, None]


async def test_a_fork_that_comes_back_from_the_judge_answers_nothing():
    async with service(judge=f"{PARTS}:of_a_group") as rewards:
        for _ in range(3):
            batch, _ = await rewards.score(batch_of(["a", "b"], columns={"do": "fork"}))
            assert batch["reward"].to_pylist() == [1.0, 1.0], "the parent's answer"


async def test_a_process_that_ran_out_of_memory_is_replaced():
    async with service(judge="tests.unit.actors.judges:leaking", max_memory_bytes=2**29) as rewards:
        batch, _ = await rewards.score(batch_of(["leak", "leak", "leak", "good", "good"]))
    assert sorted(batch["reward_status"].to_pylist()) == ["error", *["ok"] * 4], (
        "the second or third leak is too much, and all after it are judged"
    )


async def test_a_class_is_built_once_and_keeps_its_state():
    batch = await scored(["a", "b", "c"], judge={"name": f"{PARTS}:Counting", "step": 2})
    assert batch["reward"].to_pylist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ("mixed", r"takes completion of one trajectory and prompts of the group"),
        ("deaf", r"takes nothing of a trajectory; name its parameters so: prompt, completion"),
        ("greedy", r"reward.judge='tests.unit.actors.parts:greedy' needs budget"),
        ("Unbuildable", r"cannot be built: RuntimeError: no licence"),
    ],
)
async def test_a_judge_of_no_kind_is_refused_at_start(judge, message):
    with pytest.raises(ConfigError, match=message):
        await RewardService(RewardConfig.model_validate({"judge": f"{PARTS}:{judge}"})).warm_up()


async def test_functions_of_trl_run_unchanged():
    columns = {"task": "math", "ground_truth": "42"}
    judges = {
        "chars": {"name": "trl", "function": f"{PARTS}:reward_num_unique_chars"},
        "math": {"name": "trl", "function": f"{PARTS}:accuracy_of_math"},
        "format": {"name": "trl", "function": f"{PARTS}:format_of_messages", "conversational": True},
    }
    async with service(parts={name: {"judge": judge} for name, judge in judges.items()}) as rewards:
        math, _ = await rewards.score(batch_of(["<think>x</think>\\boxed{42}", "\\boxed{41}"], columns=columns))
        other, _ = await rewards.score(batch_of(["aab"], columns=columns | {"task": "coding"}))
    assert [(row["math"], row["format"]) for row in components(math)] == [(1.0, 1.0), (0.0, 0.0)]
    assert components(other) == [{"chars": 2.0, "math": None, "format": 0.0}]
    assert other["reward"].to_pylist() == [2.0], "a function that returns None for a prompt does not judge it"


async def test_an_asynchronous_function_of_trl_may_keep_a_client_between_calls():
    async with service(judge={"name": "trl", "function": f"{PARTS}:of_a_client"}) as rewards:
        batches = [(await rewards.score(batch_of(["a"])))[0] for _ in range(3)]
    assert [batch["reward_message"].to_pylist() for batch in batches] == [[None]] * 3


async def test_a_compute_score_of_verl_runs_unchanged():
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}, "extra_info": {"split": "train"}}
    batch = await scored(["42", "41"], row, judge={"name": "verl", "function": f"{PARTS}:compute_score"})
    assert batch["reward"].to_pylist() == [1.0, 0.0]
    assert components(batch) == [{"acc": 1.0}, {"acc": 0.0}]


@pytest.mark.parametrize("function", ["reward_func", "reward_func_of_other_names"])
async def test_a_reward_func_of_openrlhf_runs_unchanged(function):
    judge = {"name": "openrlhf", "function": f"{PARTS}:{function}"}
    batch = await scored(["42", "41"], {"label": "42"}, judge=judge)
    assert batch["reward"].to_pylist() == [2.0, 0.0]
    assert components(batch) == [{"score": 1.0}, {"score": 0.0}]


async def test_scores_of_a_reward_model_are_verdicts_by_label_and_one_without_a_score_is_a_failure():
    """0.5 x 2 + 1; the second trajectory was too long for the model, which fails it and no other."""
    model = {"name": "reward_model", "model": "kind"}
    settings = {
        "parts": {"warm": {"judge": {**model, "label": "warm"}, "weight": 0.5}, "polite": {"judge": {**model, "label": "polite"}}},
        "models": {"kind": {"path": "a"}},
    }  # fmt: skip
    scores = [{"kind": {"warm": 2.0, "polite": 1.0}}, {"kind": "9 tokens, and the model takes 5"}]
    async with service(**settings) as rewards:
        batch, _ = await rewards.score(batch_of(["a", "b"]), scores)
        unknown, _ = await rewards.score(batch_of(["a"]), [{"kind": {"cold": 1.0, "polite": 1.0}}])
    assert batch["reward"].to_pylist() == [2.0, None]
    assert (
        batch["reward_message"]
        .to_pylist()[1]
        .startswith("judge:warm DataError: reward.models.kind: 9 tokens, and the model takes 5")
    )
    assert "has no label 'warm'; it has: cold, polite" in unknown["reward_message"].to_pylist()[0]

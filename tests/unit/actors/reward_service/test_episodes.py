"""What environments return and what episodes earn, beside judges or without them."""

import json
from typing import Any

import pyarrow as pa
import pytest

from actors.reward_service.service import RewardService
from cluster.contracts.config import RewardConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardPart
from cluster.contracts.schema import to_batch
from tests.unit.actors.batches import batch_of

JUDGES = "tests.unit.actors.judges"


def played(*rows: dict[str, Any]) -> pa.RecordBatch:
    """One group of episodes; each row has what differs. Completions have the text `good` and four tokens, of which two are sampled."""
    (single,) = batch_of(["good"]).to_pylist()
    common = {
        "completion_token_ids": [3, 4, 5, 6],
        "loss_mask": [True, False, False, True],
        "rollout_logprobs": [-0.5] * 4,
        "policy_versions": [0] * 4,
        "episode": "{}",
        "environment": "game",
    }
    return to_batch([{**single, **common, "sample_index": index, **row} for index, row in enumerate(rows)])


def returned(value: float, **more: Any) -> dict[str, Any]:
    return {"reward": value, "reward_status": "ok", "reward_components": [("environment", value)], **more}


async def scored(batch: pa.RecordBatch, **settings: Any) -> list[dict[str, Any]]:
    service = RewardService(RewardConfig(**settings))
    try:
        columns, _ = await service.score(batch)
    finally:
        await service.close()
    return columns.to_pylist()


async def test_without_a_judge_the_reward_is_what_the_environment_returned():
    (row,) = await scored(played(returned(0.5)))
    assert (row["reward"], row["reward_status"], row["reward_components"]) == (0.5, "ok", [("environment", 0.5)])
    assert "token_rewards" not in row


async def test_what_was_earned_is_added_and_the_rest_stands_at_the_last_sampled_token():
    earned = {"token_rewards": [0.25, 0.0, 0.0, 0.5]}
    first, second = await scored(played(returned(1.0, **earned), returned(2.0)))
    assert (first["reward"], first["token_rewards"]) == (1.75, [0.25, 0.0, 0.0, 1.5])
    assert (second["reward"], second["token_rewards"]) == (2.0, None)
    assert dict(first["reward_components"]) == {"environment": 1.0, "earned": 0.75}
    assert dict(second["reward_components"]) == {"environment": 2.0, "earned": 0.0}


async def test_the_environments_part_has_a_weight_and_what_was_earned_has_none():
    earned = {"token_rewards": [0.25, 0.0, 0.0, 0.0]}
    (row,) = await scored(played(returned(1.0, **earned)), environment_weight=0.5)
    assert (row["reward"], row["token_rewards"]) == (0.75, [0.25, 0.0, 0.0, 0.5])
    assert dict(row["reward_components"]) == {"environment": 1.0, "earned": 0.25}


@pytest.mark.slow
async def test_judges_that_are_named_add_to_it():
    parts = {"nice": RewardPart(judge=Plugin(name=f"{JUDGES}:obedient"), weight=0.1)}
    first, second = await scored(played(returned(0.5), {}), parts=parts)
    assert first["reward"] == pytest.approx(0.6)
    assert dict(first["reward_components"]) == {"environment": 0.5, "nice": 1.0}
    assert (second["reward"], dict(second["reward_components"])) == (pytest.approx(0.1), {"nice": 1.0})


@pytest.mark.slow
async def test_the_only_judge_adds_too_once_it_is_named():
    (row,) = await scored(played(returned(0.5)), judge=Plugin(name=f"{JUDGES}:obedient"))
    assert row["reward"] == 1.5


async def test_no_reward_and_no_judge_is_a_failure_and_not_a_zero():
    (row,) = await scored(played({}))
    assert (row["reward"], row["reward_status"]) == (None, "error")
    assert "the environment returned no reward, and no judge is named" in row["reward_message"]


async def test_a_failed_episode_keeps_its_status_and_its_token_rewards():
    failed = {"reward_status": "timeout", "reward_message": "too slow", "token_rewards": [0.25, 0.0, 0.0, 0.0]}
    (row,) = await scored(played(failed))
    assert (row["reward"], row["reward_status"], row["reward_message"]) == (None, "timeout", "too slow")
    assert row["token_rewards"] == [0.25, 0.0, 0.0, 0.0]


async def test_all_segments_of_an_episode_have_its_one_reward():
    common = returned(1.0, num_segments=2, sample_index=0)
    segments = [
        {**common, "segment_index": 0, "token_rewards": [0.25, 0.0, 0.0, 0.0]},
        {**common, "segment_index": 1, "token_rewards": [0.0, 0.0, 0.0, 0.5]},
    ]
    first, second = await scored(played(*segments))
    assert [first["reward"], second["reward"]] == [1.75, 1.75]
    assert [first["token_rewards"], second["token_rewards"]] == [[0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.5]]


@pytest.mark.slow
async def test_judges_read_the_whole_conversation():
    told = '[{"role": "user", "content": "good"}]'
    (row,) = await scored(played({"messages": told}), judge=Plugin(name=f"{JUDGES}:first_message"))
    assert row["reward"] == 1.0


@pytest.mark.slow
async def test_an_answer_after_the_reasoning_counts_though_the_episode_was_cut_off_and_a_thought_does_not():
    """In an episode the reasoning is apart, so the answer has no `</think>` before it."""
    asked = {"role": "user", "content": "2 + 2?"}
    said = {"role": "assistant", "content": "It is \\boxed{4}. Let me expl", "reasoning_content": "Twice 2."}
    thought = {"role": "assistant", "content": "", "reasoning_content": "Is it \\boxed{4}?"}
    raw = {"role": "assistant", "content": "Is it \\boxed{4}?"}
    rows = [
        {"messages": json.dumps([asked, last]), "prompt_text": "2 + 2?<think>\n", "finish_reason": "length"}
        for last in (said, thought, raw)
    ]
    for row in rows:
        row["info"] = json.dumps({"answer": "4"})
    judged = await scored(played(*rows), judge=Plugin(name="math_verify"))
    assert [row["reward"] for row in judged] == [1.0, 0.0, 0.0]

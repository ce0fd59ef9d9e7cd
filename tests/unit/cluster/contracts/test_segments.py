"""Trajectories of several segments: which rows are one, what they come to together, and which are refused."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.schema import added, columns_of, joined, summarize, to_batch, upgraded, validate
from cluster.contracts.segments import episodes, whole
from cluster.episode_metrics import episode_metrics
from tests.unit.cluster.contracts.rows import before, row


def segments(*lengths: int, sample: int = 0, **changed: Any) -> list[dict[str, Any]]:
    """Rows of one episode, with a completion of each length: tokens count from 3, log-probs and versions follow them."""
    rows: list[dict[str, Any]] = []
    for index, length in enumerate(lengths):
        first = 3 + sum(lengths[:index])
        rows.append(
            row(
                sample_index=sample,
                segment_index=index,
                num_segments=len(lengths),
                prompt_token_ids=[1, 2, *range(3, first)],
                completion_token_ids=list(range(first, first + length)),
                loss_mask=[True] * length,
                rollout_logprobs=[-float(first + place) for place in range(length)],
                policy_versions=list(range(first, first + length)),
                completion_text="abc"[index],
                finish_reason="stop" if index < len(lengths) - 1 else "length",
            )
            | {name: values[index] for name, values in changed.items()}
        )
    return rows


def test_an_episode_is_the_completions_of_its_segments_one_after_another():
    batch = to_batch([row(), *segments(2, 1, sample=1), row(sample_index=2)])
    assert [list(rows) for rows in episodes(batch)] == [[0], [1, 2], [3]]
    joined_up = validate(whole(batch))
    assert joined_up["sample_index"].to_pylist() == [0, 1, 2]
    (told,) = joined_up.slice(1, 1).to_pylist()
    assert (told["prompt_token_ids"], told["completion_token_ids"]) == ([1, 2], [3, 4, 5])
    assert (told["rollout_logprobs"], told["policy_versions"]) == ([-3.0, -4.0, -5.0], [3, 4, 5])
    assert (told["completion_text"], told["finish_reason"]) == ("ab", "length")
    assert (told["segment_index"], told["num_segments"], told["token_rewards"]) == (0, 1, None)


def test_turns_keep_their_places_in_the_whole_completion():
    """The first segment says where its turns are; the second is one."""
    turns = [{"start": 0, "end": 1, "finish_reason": "stop"}, {"start": 2, "end": 3, "finish_reason": "stop"}]
    told = whole(to_batch(segments(3, 2, turns=(turns, None))))["turns"][0].as_py()
    assert [(turn["start"], turn["end"], turn["finish_reason"]) for turn in told] == [
        (0, 1, "stop"), (2, 3, "stop"), (3, 5, "length"),
    ]  # fmt: skip


def test_a_batch_of_single_segments_is_whole_as_it_is():
    batch = to_batch([row(), row(sample_index=1)])
    assert whole(batch) is batch


@pytest.mark.parametrize("rows", [[0], [1], [1, 0], [0, 0, 1], [0, 2, 1], [0, 1, 1]])
def test_an_episode_without_one_of_its_segments_is_refused_by_name(rows):
    batch = to_batch([*segments(1, 1), row(sample_index=1)])
    with pytest.raises(DataError, match=r"group 00000007, sample 0: the episode is incomplete: it has 2 segments"):
        episodes(batch.take(pa.array(rows)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": (1.0, 0.5)}, r"field 'reward': segments of one episode differ: \[1.0, 0.5\]"),
        ({"token_rewards": ([1.0], None)}, "field 'token_rewards': is null, but other segments"),
    ],
)
def test_segments_that_say_different_things_of_their_episode_are_refused(changed, message):
    with pytest.raises(DataError, match=f"group 00000007, sample 4, {message}"):
        whole(to_batch(segments(1, 1, sample=4, **changed)))


def test_a_summary_counts_episodes_and_takes_the_oldest_version_of_all_their_segments():
    batch = to_batch([*segments(2, 1, policy_versions=([5, 6], [4])), row(sample_index=1)])
    summary = summarize(batch)
    assert (summary.num_trajectories, summary.num_tokens, summary.rewards) == (2, 6, (1.0, 1.0))
    assert (summary.completion_lengths, summary.truncated, summary.oldest_versions) == ((3, 3), (True, False), (4, 2))


def test_a_summary_has_what_each_episode_tells_of_itself_and_older_records_tell_less():
    older = {"num_calls": 1, "num_malformed_calls": 0, "log": {}}
    newer = older | {"num_written_tokens": {"tool": 3}, "num_retries": 2}
    rows = [row(sample_index=index, episode=json.dumps(each)) for index, each in enumerate([older, newer])]
    stats = [each for each in summarize(to_batch(rows)).episodes if each is not None]
    assert [(each.num_calls, each.written_by_role, each.num_retries) for each in stats] == [
        (1, {}, 0),
        (1, {"tool": 3}, 2),
    ]


def test_a_summary_of_chosen_episodes_is_that_of_the_record_which_has_no_others():
    reports = [
        {"num_calls": 2, "num_malformed_calls": 1, "num_uncanonical_turns": 1, "num_written_tokens": {"tool": 1}},
        {"num_calls": 0, "num_malformed_calls": 0},
        {"num_calls": 5, "num_malformed_calls": 0, "num_retries": 1},
    ]
    told = [json.dumps(each | {"log": {"solved": index / 2, "note": "a text"}}) for index, each in enumerate(reports)]
    turn = [{"start": 0, "end": 3, "finish_reason": "stop"}]
    written = {"loss_mask": [True, False, True], "rollout_logprobs": [-1.0, 0.0, -1.0]}
    batch = to_batch(
        [
            row(environment="game", episode=told[0], turns=turn, model_seconds=0.5, **written),
            *segments(2, 1, sample=1, environment=["game"] * 2, episode=[told[1]] * 2),
            row(environment="game", episode=told[2], turns=turn, sample_index=2),
        ]
    )
    summary, (record,) = summarize(batch), joined([batch, [0, 2]])
    assert replace(summary.of([0, 2]), size_bytes=record.nbytes, is_chosen=False) == summarize(record)
    found = episode_metrics([summary.of([0, 2])])
    assert (found["environment/game/solved"], found["environment/game/calls"]) == (0.5, 3.5)
    assert episode_metrics([summary.of([1])])["environment/game/turns"] == 2.0


def test_rewards_that_are_added_to_segments_are_told_once_an_episode():
    batch = to_batch([*segments(1, 1, 1), row(sample_index=1)])
    failed = columns_of(
        batch,
        reward=[None, None, None, 0.5],
        reward_status=["error"] * 3 + ["ok"],
        reward_components=[[]] * 4,
        reward_message=["no"] * 3 + [None],
    )
    assert (added(failed)["rewards"], added(failed)["num_reward_errors"]) == ((None, 0.5), 1)
    assert joined([batch, failed])[0]["reward"].to_pylist() == [None, None, None, 0.5]


def test_a_trajectory_that_is_chosen_keeps_all_its_segments():
    batch = to_batch([row(), *segments(1, 1, sample=1), row(sample_index=2)])
    assert joined([batch, [1, 2]])[0]["sample_index"].to_pylist() == [1, 1, 2]


def test_a_batch_of_the_version_before_is_read_as_single_segments():
    assert validate(before(row(), row(sample_index=1))).equals(to_batch([row(), row(sample_index=1)]))


def test_a_batch_of_schema_3_has_no_experts():
    batch = to_batch([row(), row(sample_index=1)])
    third = batch.drop_columns(["routed_experts"]).replace_schema_metadata({"treadwheel.schema_version": "3"})
    assert validate(third).equals(batch)
    with pytest.raises(DataError, match=r"missing \['turns'\]"):
        validate(third.drop_columns(["turns"]))


def test_a_batch_of_the_version_before_that_lacks_more_is_refused():
    with pytest.raises(DataError, match=r"missing \['seed'\]"):
        validate(upgraded(before(row()).drop_columns(["seed"])))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"segment_index": 1}, "segment_index"),
        ({"segment_index": -1}, "segment_index"),
        ({"num_segments": 0}, "segment_index"),
        ({"turns": [{"start": 0, "end": 4, "finish_reason": "stop"}]}, "turns"),
        ({"turns": [{"start": 1, "end": 1, "finish_reason": "stop"}]}, "turns"),
        ({"turns": [{"start": 1, "end": 2, "finish_reason": "stop"}] * 2}, "turns"),
    ],
)
def test_a_row_whose_segments_or_turns_cannot_be_is_named(changed, field):
    with pytest.raises(DataError, match=rf"row 1.*field '{field}'"):
        to_batch([row(), row(sample_index=1, **changed)])

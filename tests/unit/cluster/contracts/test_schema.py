import math
from types import SimpleNamespace

import pyarrow as pa
import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.schema import (
    SCHEMA,
    as_one,
    columns_of,
    info_of,
    joined,
    summarize,
    to_batch,
    validate,
    with_columns,
)
from cluster.contracts.types import RewardFailure
from tests.unit.cluster.contracts.rows import row


def test_a_batch_survives_the_wire():
    batch = to_batch([row(), row(sample_index=1)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        assert validate(reader.read_next_batch()).equals(batch)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (
            {"completion_token_ids": [], "loss_mask": [], "rollout_logprobs": [], "policy_versions": []},
            "completion_token_ids",
        ),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"loss_mask": [True]}, "loss_mask"),
        ({"rollout_logprobs": [-0.5]}, "rollout_logprobs"),
        ({"policy_versions": [1, 2, 3, 4]}, "policy_versions"),
        ({"reference_logprobs": [-0.5]}, "reference_logprobs"),
        ({"reference_top_ids": [1, 2], "reference_top_logprobs": [-1.0] * 5}, "reference_top_ids"),
        ({"reference_top_ids": [1, 2, 3], "reference_top_logprobs": [-1.0] * 3}, "reference_top_logprobs"),
        ({"reference_top_ids": [1, 2, 3]}, "reference_top_logprobs"),
        ({"reference_top_logprobs": [-1.0] * 6}, "reference_top_logprobs"),
        (
            {"reference_top_ids": [1, 2, 3], "reference_top_logprobs": [-1.0] * 5 + [-math.inf]},
            "reference_top_logprobs",
        ),
        (
            {"routed_experts": bytes(3)},
            "routed_experts",
        ),  # four positions are read: two of the prompt, two of the completion
        ({"routed_experts": b""}, "routed_experts"),
        ({"rollout_logprobs": [-0.5, math.nan, -1.0]}, "rollout_logprobs"),
        ({"reward": math.inf}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward_status": "error"}, "reward"),
        ({"reward_components": [("format", math.nan)]}, "reward_components"),
        ({"reward_status": "fine"}, "reward_status"),
        ({"finish_reason": "tired"}, "finish_reason"),
        ({"group_id": None}, "group_id"),
        ({"completion_token_ids": [3, "four", 5]}, "completion_token_ids"),
        ({"ticket_index": 2**70}, "ticket_index"),
        ({"prompt_token_ids": [1, None]}, "prompt_token_ids"),
        ({"completion_token_ids": [3, None, 5]}, "completion_token_ids"),
        ({"loss_mask": [True, None, True]}, "loss_mask"),
        ({"policy_versions": [None, 2, 3]}, "policy_versions"),
        ({"rollout_logprobs": [-0.5, None, -1.0]}, "rollout_logprobs"),
        ({"turns": [None]}, "turns"),
        ({"turns": [{"start": 0, "end": None, "finish_reason": "stop"}]}, "turns"),
    ],
)
def test_a_broken_row_is_named_with_its_field(changed, field):
    with pytest.raises(DataError, match=rf"row 1.*field '{field}'"):
        to_batch([row(), row(sample_index=1, **changed)])


EMPTY = {
    "completion_token_ids": [],
    "loss_mask": [],
    "rollout_logprobs": [],
    "policy_versions": [],
    "completion_text": "",
}


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_an_episode_that_failed_before_its_first_token_completes_its_group(status):
    died = row(
        **EMPTY, sample_index=1, reward=None, reward_status=status, reference_top_ids=[], reference_top_logprobs=[]
    )
    scored = {"reference_top_ids": [1, 2, 3], "reference_top_logprobs": [-1.0] * 6}
    summary = summarize(to_batch([row(**scored), died]))
    assert (summary.num_trajectories, summary.num_tokens, summary.completion_lengths) == (2, 3, (3, 0))
    assert (summary.oldest_versions, summary.min_policy_version) == ((2, None), 2)
    assert summary.can_train(max_failed_share=1.0) is False, "one that is left of two has nothing to be compared with"


def test_a_reward_that_is_added_to_an_empty_completion_is_refused():
    group = to_batch([row(), row(**EMPTY, sample_index=1, reward=None, reward_status="error")])
    with pytest.raises(DataError, match=r"row 1.*field 'completion_token_ids': is empty: only an episode"):
        with_columns(group, reward=[1.0, 0.0], reward_status=["ok", "ok"])


def test_a_failed_reward_has_no_value():
    batch = to_batch([row(reward=None, reward_status="timeout"), row()])
    summary = summarize(batch)
    assert summary.rewards == (None, 1.0)
    assert summary.known_rewards == (1.0,)
    assert summary.num_reward_timeouts == 1


def test_a_summary_says_why_rewards_failed_once_for_each_kind():
    failed = {"reward": None, "reward_status": "error"}
    messages = ["KeyError: 'anser'", "ValueError: could not read\n'x'", "ValueError: could not read 'y'"]
    late = {"reward": None, "reward_status": "timeout", "reward_message": "no reward within reward.timeout_s=1"}
    batch = to_batch([row(), row(**late), *(row(**failed, reward_message=message) for message in messages)])
    assert summarize(batch).reward_failures == (
        RewardFailure(kind="ValueError", message="ValueError: could not read 'x'", count=2),
        RewardFailure(kind="timeout", message="no reward within reward.timeout_s=1", count=1),
        RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=1),
    )


def test_a_summary_tells_of_a_few_kinds_of_failure_and_counts_all():
    rows = [row(reward=None, reward_status="error", reward_message=f"Error{n}: why") for n in range(30)]
    summary = summarize(to_batch(rows))
    assert (len(summary.reward_failures), summary.num_reward_errors) == (4, 30)


def test_a_summary_counts_tokens_and_versions_that_train():
    batch = to_batch([row(loss_mask=[False, True, True], policy_versions=[0, 2, 3], finish_reason="length"), row()])
    summary = summarize(batch)
    assert (summary.num_trajectories, summary.num_tokens) == (2, 5)
    assert (summary.completion_lengths, summary.truncated) == ((3, 3), (True, False))
    assert summary.min_policy_version == 2


def test_a_summary_has_the_judges_components_of_each_trajectory_and_none_where_it_lacks_one():
    rows = [row(reward_components=[("format", 1.0), ("length", 0.25)]), row(reward_components=[("format", 0.5)]), row()]
    rows.append(row(reward_components=[("format", None)]))
    assert summarize(to_batch(rows)).reward_components == {
        "format": (1.0, 0.5, None, None),
        "length": (0.25, None, None, None),
    }


def test_an_added_column_is_validated_too():
    batch = to_batch([row()])
    scored = with_columns(batch, reference_logprobs=[[-0.1, -0.2, -0.3]])
    assert scored["reference_logprobs"][0].as_py() == pytest.approx([-0.1, -0.2, -0.3])
    with pytest.raises(DataError, match="reference_logprobs"):
        with_columns(batch, reference_logprobs=[[-0.1]])
    with pytest.raises(DataError, match="'taste' is not in the trajectory schema"):
        with_columns(batch, taste=["sweet"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.take(pa.array([0])), r"is \['00000007'\], in the group \['00000007', '00000007'\]"),
        (lambda rows: rows.take(pa.array([1, 0])), r"'sample_index' is \[1, 0\], in the group \[0, 1\]"),
        (lambda rows: rows.set_column(0, "group_id", pa.array(["8", "8"])), r"'group_id' is \['8', '8'\], in"),
        (lambda rows: rows.append_column("taste", pa.array([1, 2])), "'taste' of type int64 is not in the traj"),
        (lambda rows: rows.set_column(3, "reward", pa.array([1, 2])), "'reward' of type int64 is not in the traj"),
        (lambda rows: rows.replace_schema_metadata({}), "schema version 'none', this build reads '2'"),
    ],
)
def test_columns_of_other_rows_or_of_another_schema_are_not_joined(change, message):
    batch = to_batch([row(), row(sample_index=1)])
    columns = columns_of(batch, reward=[0.0, 2.0], reward_status=["ok"] * 2)
    assert joined([batch, columns, batch])[0]["reward"].to_pylist() == [0.0, 2.0]
    with pytest.raises(DataError, match=message):
        joined([batch, change(columns)])


def test_another_schema_version_is_refused():
    old = to_batch([row()]).replace_schema_metadata({"treadwheel.schema_version": "0"})
    with pytest.raises(DataError, match="schema version '0', this build reads '2'"):
        validate(old)


def test_foreign_and_missing_fields_are_named():
    batch = to_batch([row()])
    with pytest.raises(DataError, match=r"missing \['seed'\]"):
        validate(batch.drop_columns(["seed"]))


def test_texts_that_are_too_long_for_one_batch_are_named_with_a_way_out(monkeypatch):
    """Seen in review: a ValueError of too many values to unpack ended the run."""
    long, short = to_batch([row(info='{"page": "' + "x" * 1000 + '"}')]), to_batch([row(sample_index=1)])

    class Uncombined:
        """As Arrow leaves a table whose texts are longer than 2 GB."""

        @classmethod
        def from_batches(cls, batches):
            table = table_of(batches)
            return SimpleNamespace(combine_chunks=lambda: table)

    table_of = pa.Table.from_batches
    assert as_one([long, short]).num_rows == 2
    monkeypatch.setattr(pa, "Table", Uncombined)
    with pytest.raises(
        DataError, match=r"field 'info' of the step's .* bytes, .*groups_per_step, or leave long columns"
    ):
        as_one([long, short])


def test_info_is_json():
    assert info_of(to_batch([row(info='{"answer": "2"}')]), 0) == {"answer": "2"}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("reward", [float("nan")]),
        ("reward_status", ["error"]),  # of a reward that is known
        ("reward_components", [[("style", float("inf"))]]),
        ("reward_components", [None]),
        ("reference_logprobs", [[-0.5]]),
        ("reference_top_ids", [[1]]),
    ],
)
def test_a_column_that_is_put_in_is_checked_as_the_whole_batch_is(column, values):
    batch = to_batch([row(reward=1.0, reward_status="ok")])
    with pytest.raises(DataError, match="field 'reward" if column.startswith("reward") else f"field '{column}'"):
        with_columns(batch, **{column: values})

"""The SQL of docs/data.md, over a run whose answers can be worked out by hand."""

import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import treadwheel
from tests.unit.deploy.test_export import recorded

PAGE = (Path(__file__).parents[4] / "docs" / "data.md").read_text(encoding="utf-8")
QUERIES = {
    section.partition("\n")[0]: found[1]
    for section in PAGE.split("\n## ")
    if (found := re.search(r'duckdb\.sql\("""(.*?)"""', section, re.DOTALL))
}

FIRST = [
    {"prompt_id": "easy", "reward": 1.0, "completion_text": "2"},
    {"prompt_id": "easy", "reward": 0.5, "completion_text": "3", "finish_reason": "length"},
]
SECOND = [
    {"prompt_id": "hard", "reward": 0.0, "completion_text": "4"},
    {"prompt_id": "hard", "reward": None, "reward_status": "error", "reward_message": "KeyError: 'answer'"},
]


@pytest.fixture
def trajectories(tmp_path):
    recorded(tmp_path, FIRST, SECOND)
    (tmp_path / "run.yaml").write_text("run_dir: mine\nmodel: {path: m}\nprompts: {name: file, path: p}\n")
    return treadwheel.open_run(str(tmp_path)).trajectories()


def test_the_hardest_prompt_is_first_and_a_failed_reward_counts_as_no_try(trajectories):
    found = duckdb.execute(QUERIES["The hardest prompts"]).fetchall()
    assert found == [("1+1=", 1, 0.0, 0.0), ("1+1=", 2, 0.75, 1.0)]


def test_reward_by_length_counts_what_was_cut_off(trajectories):
    # All have three tokens; the three rewards that are known are 1, 0.5 and 0; one of four was cut off.
    assert duckdb.execute(QUERIES["Reward by length"]).fetchall() == [(3, 4, 0.5, 0.25)]


def test_failures_are_counted_by_the_name_of_their_error(trajectories):
    assert duckdb.execute(QUERIES["Failures and their reasons"]).fetchall() == [("error", None, "KeyError", 1)]


def test_failures_of_different_parts_are_counted_apart(tmp_path):
    messages = [
        "judge:style TimeoutError: no answer",
        "judge:maths KeyError: 'answer'",
        "judge:maths KeyError: 'solution'",
        "judge:maths ValueError: 'two'; judge:style TimeoutError: no answer",
    ]
    failed = [{"reward": None, "reward_status": "error", "reward_message": message} for message in messages]
    recorded(tmp_path, failed)
    (tmp_path / "run.yaml").write_text("run_dir: mine\nmodel: {path: m}\nprompts: {name: file, path: p}\n")
    trajectories = treadwheel.open_run(str(tmp_path)).trajectories()
    assert trajectories.count_rows() == 4
    assert duckdb.execute(QUERIES["Failures and their reasons"]).fetchall() == [
        ("error", None, "judge:maths KeyError", 2),
        ("error", None, "judge:maths ValueError", 1),
        ("error", None, "judge:style TimeoutError", 1),
    ]


def test_mismatch_by_staleness(trajectories):
    sampled = trajectories.to_table(columns=["ticket_index", "sample_index", "rollout_logprobs"]).to_pylist()
    off = {0: 0.5, 1: 0.25}  # nats, by ticket; the last token of each is not trained
    learned = pa.table(
        {
            "ticket_index": [each["ticket_index"] for each in sampled],
            "sample_index": [each["sample_index"] for each in sampled],
            "policy_logprobs": [
                [*(value + off[each["ticket_index"]] for value in each["rollout_logprobs"][:-1]), None]
                for each in sampled
            ],
        }
    )
    assert learned.num_rows == 4
    ((staleness, tokens, nats),) = duckdb.execute(QUERIES["Staleness and mismatch"]).fetchall()
    # Of four trajectories two tokens each, each sampled by the version that its step began with.
    assert (staleness, tokens) == (0, 8) and nats == pytest.approx(0.375, abs=1e-6)


def test_the_best_completion_of_each_prompt(trajectories):
    best = duckdb.execute(QUERIES["The best completions"]).fetchall()
    assert [(step, completion, reward) for step, _, completion, _, reward in best] == [(1, "2", 1.0), (2, "4", 0.0)]


def test_metrics_join_the_trajectories_of_their_step(trajectories):
    metrics = pa.table({"policy_version": [0, 1, 2], "eval/reward": [0.1, 0.2, 0.3]})
    assert metrics.num_rows == 3
    assert duckdb.execute(QUERIES["Join with metrics"]).fetchall() == [(1, 3.0, 0.2), (2, 3.0, 0.3)]

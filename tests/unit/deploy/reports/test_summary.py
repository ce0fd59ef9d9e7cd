"""What a run came to: two windows that share no step."""

from dataclasses import asdict

import pytest

from cluster.record.run_directory import EVENTS, METRICS, SUMMARY, RunDirectory
from deploy.reports.summary import Summary, summarize


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([0.5], 0.5, None),
        ([0.0, 1.0], 0.0, 1.0),
        ([0.0, 0.5, 1.0], 0.0, 1.0),
        ([0.0] * 3 + [1.0] * 3, 0.0, 1.0),
        ([0.0] * 5 + [0.5] * 9 + [1.0] * 5, 0.0, 1.0),
    ],
)
def test_the_first_and_the_last_steps_are_not_the_same_steps(tmp_path, rewards, first, last):
    directory = RunDirectory(str(tmp_path))
    for version, reward in enumerate(rewards, start=1):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": reward})
    summary = summarize(directory)
    assert (summary.reward_first, summary.reward_last) == (first, last)


def test_rewards_as_large_as_a_float_can_be_have_a_mean(tmp_path):
    """Seen before: summary.json held `Infinity`, which is no JSON."""
    directory = RunDirectory(str(tmp_path))
    for version in range(1, 5):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": 1.5e308})
    assert summarize(directory).reward_last == 1.5e308


def test_a_summary_is_of_all_logged_steps(tmp_path):
    """The run logs its numbers from step 3 on. Step 4 was learned again, and its time is not known."""
    directory = RunDirectory(str(tmp_path))
    directory.append_json(METRICS, {"policy_version": 0, "time": 0.0, "eval/accuracy": 0.25, "eval/reward": 0.5})
    for version, step_s, accuracy in ((3, 2.0, 0.5), (4, None, None), (5, 4.0, 0.75)):
        numbers = {"tokens/sampled": 10.0 * version, "tokens/trained": 1.0 * version, "time/step_s": step_s}
        directory.append_json(METRICS, {"policy_version": version, "time": 9.0, "eval/accuracy": accuracy, **numbers})
    expected = Summary(
        num_steps=5,
        train_seconds=6.0,
        reward_first=None,
        reward_last=None,
        eval_first=0.25,
        eval_last=0.75,
        eval_reward_first=0.5,
        eval_reward_last=None,
        sampled_tokens=120,
        trained_tokens=12,
        seconds_to_first_step=None,
    )
    assert summarize(directory) == expected and directory.read_json(SUMMARY) == asdict(expected)


def test_one_evaluation_is_not_shown_as_two(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.append_json(METRICS, {"policy_version": 0, "time": 0.0, "eval/accuracy": 0.25})
    summary = summarize(directory)
    assert (summary.eval_first, summary.eval_last) == (0.25, None)


def test_the_first_step_took_as_long_as_the_process_that_made_it(tmp_path):
    """One that failed began at 0, the one that made the step at 1000, one that went on at 1100."""
    directory = RunDirectory(str(tmp_path))
    for started_at in (0.0, 1000.0, 1100.0):
        directory.append_json(EVENTS, {"kind": "launched", "time": started_at, "started_at": started_at})
    assert summarize(directory).seconds_to_first_step is None
    directory.append_json(METRICS, {"policy_version": 1, "time": 1030.0})
    directory.append_json(METRICS, {"policy_version": 2, "time": 1200.0})
    assert summarize(directory).seconds_to_first_step == 30.0

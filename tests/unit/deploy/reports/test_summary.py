"""What a run came to: two windows that share no step."""

import pytest

from cluster.record.run_directory import EVENTS, METRICS, RunDirectory
from deploy.reports.summary import summarize


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


def test_one_evaluation_is_not_shown_as_two(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.append_json(METRICS, {"policy_version": 0, "time": 0.0, "eval/accuracy": 0.25})
    summary = summarize(directory)
    assert (summary.eval_first, summary.eval_last) == (0.25, None)


def test_the_first_step_took_as_long_as_the_process_that_made_it(tmp_path):
    """One that failed began at 0, the one that made the step at 1000, one that went on at 1100."""
    directory = RunDirectory(str(tmp_path))
    for started_at in (0.0, 1000.0, 1100.0):
        directory.append_json(EVENTS, {"kind": "launched", "started_at": started_at})
    assert summarize(directory).seconds_to_first_step is None
    directory.append_json(METRICS, {"policy_version": 1, "time": 1030.0})
    assert summarize(directory).seconds_to_first_step == 30.0

"""Numbers of environments, by hand."""

import sys
from typing import Any

import pytest

from cluster.contracts.types import EpisodeStats, GroupSummary
from cluster.episode_metrics import episode_metrics, failed_episodes
from tests.fakes import group_summary


def group(name: str | None, *episodes: dict[str, Any], rewards=(1.0, 0.5)) -> GroupSummary:
    """Two episodes of three turns each, or one for each of `episodes`, with these numbers."""
    common: dict[str, Any] = {"num_turns": 3, "num_calls": 0, "num_malformed_calls": 0, "num_sampled_tokens": 15}
    rest: dict[str, Any] = {"num_written_tokens": 5, "seconds": 2.0, "model_seconds": 1.5}
    numbers = [common | rest | each for each in episodes or ({}, {})]
    told = () if name is None else tuple(EpisodeStats(environment=name, **each) for each in numbers)
    return group_summary(0, rewards=rewards, truncated=(True, False), episodes=told)


def test_single_turns_have_none():
    assert episode_metrics([group(None)]) == {}


def test_means_are_over_the_episodes_of_an_environment():
    called = group("game", {"num_turns": 1, "num_calls": 3, "num_malformed_calls": 1}, {"num_turns": 1, "num_calls": 1})
    found = episode_metrics([group("game"), called, group("x")])
    assert found["environment/game/turns"] == 2.0
    assert (found["environment/game/calls"], found["environment/game/malformed_share"]) == (1.0, 0.25)
    assert found["environment/game/written_share"] == 0.25
    assert found["environment/game/truncated_share"] == 0.5
    assert found["environment/game/reward"] == 0.75
    assert (found["environment/x/turns"], found["environment/x/calls"]) == (3.0, 0.0)


def test_time_that_is_not_the_models_is_waiting():
    found = episode_metrics([group("game")])
    assert found["time/environment/game/episode_s"] == 2.0
    assert found["time/environment/game/waiting_share"] == 0.25


def test_written_tokens_are_told_apart_by_the_role_that_they_follow():
    first = group("game", {"written_by_role": {"tool": 5}}, {"written_by_role": {"tool": 1, "user": 4}})
    groups = [first, group("game", *[{"written_by_role": {"user": 5}}] * 2)]
    found = episode_metrics(groups)
    assert found["environment/game/written_share/tool"] == 6 / 80
    assert found["environment/game/written_share/user"] == 14 / 80


def test_retries_of_a_step_are_counted():
    found = failed_episodes(
        [group("game", {"num_retries": 1}, {"num_retries": 1}), group("game", {}, {"num_retries": 1})]
    )
    assert found["environment/game/num_retried"] == 3.0


def test_failures_are_counted_by_stage_and_logs_are_means_of_those_that_logged():
    groups = [
        group("game", {"failed_stage": "tool:search"}, {"log": {"solved": 1.0}}),
        group("game", {"failed_stage": "environment", "log": {"solved": 0.0}}, {"log": {"solved": 0.5}}),
    ]
    found = episode_metrics(groups) | failed_episodes(groups)
    assert found["environment/game/num_failed"] == 2.0
    assert found["environment/game/num_failed/tool:search"] == 1.0
    assert found["environment/game/solved"] == 0.5


def test_what_an_environment_logs_gives_way_to_a_metric_of_its_name():
    logged = group("game", {"log": {"turns": 99.0, "num_failed": 7.0}})
    found = episode_metrics([logged])
    assert found["environment/game/turns"] == 3.0 and "environment/game/num_failed" not in found


@pytest.mark.parametrize("num_episodes", [2, 3, 6])
def test_the_largest_numbers_that_may_be_logged_have_a_mean(num_episodes: int):
    most = sys.float_info.max
    found = episode_metrics(
        [group("game", *[{"log": {"distance": most}}] * num_episodes, rewards=(most,) * num_episodes)]
    )
    assert found["environment/game/distance"] == found["environment/game/reward"] == most

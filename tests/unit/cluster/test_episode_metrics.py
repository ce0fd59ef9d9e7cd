"""Numbers of environments, by hand."""

import sys

import pytest

from cluster.contracts.types import EpisodeStats, GroupSummary
from cluster.episode_metrics import episode_metrics


def group(name: str | None, *, rewards=(1.0, 0.5), **stats) -> GroupSummary:
    common = {"num_episodes": 2, "num_turns": 6, "num_calls": 0, "num_malformed_calls": 0, "num_sampled_tokens": 30}
    rest = {"num_written_tokens": 10, "seconds": 4.0, "model_seconds": 3.0}
    return GroupSummary(
        group_id="0",
        prompt_id="p",
        num_trajectories=2,
        num_tokens=40,
        size_bytes=1,
        oldest_versions=(0, 0),
        rewards=rewards,
        truncated=(True, False),
        episodes=None if name is None else EpisodeStats(environment=name, **(common | rest | stats)),
    )


def test_single_turns_have_none():
    assert episode_metrics([group(None)]) == {}


def test_means_are_over_the_episodes_of_an_environment():
    found = episode_metrics([group("game"), group("game", num_turns=2, num_calls=4, num_malformed_calls=1), group("x")])
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
    groups = [group("game", written_by_role={"tool": 6, "user": 4}), group("game", written_by_role={"user": 10})]
    found = episode_metrics(groups)
    assert found["environment/game/written_share/tool"] == 6 / 80
    assert found["environment/game/written_share/user"] == 14 / 80


def test_retries_of_a_step_are_counted():
    found = episode_metrics([group("game", num_retries=2), group("game", num_retries=1)])
    assert found["environment/game/num_retried"] == 3.0


def test_failures_are_counted_by_stage_and_logs_are_means_of_those_that_logged():
    failed = group("game", failed_stages={"tool:search": 1}, logs={"solved": (1.0,)})
    found = episode_metrics([failed, group("game", failed_stages={"environment": 1}, logs={"solved": (0.0, 0.5)})])
    assert found["environment/game/num_failed"] == 2.0
    assert found["environment/game/num_failed/tool:search"] == 1.0
    assert found["environment/game/solved"] == 0.5


def test_what_an_environment_logs_gives_way_to_a_metric_of_its_name():
    assert episode_metrics([group("game", logs={"turns": (99.0,)})])["environment/game/turns"] == 3.0


@pytest.mark.parametrize("num_episodes", [2, 3, 6])
def test_the_largest_numbers_that_may_be_logged_have_a_mean(num_episodes: int):
    most = sys.float_info.max
    logged = (most,) * num_episodes
    found = episode_metrics([group("game", logs={"distance": logged}, rewards=logged)])
    assert found["environment/game/distance"] == found["environment/game/reward"] == most

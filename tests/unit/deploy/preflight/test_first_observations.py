"""Two episodes of one task, compared before a run."""

import pytest

from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import EpisodeTask
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from deploy.preflight.first_observations import FirstObservations, first_observations

pytestmark = pytest.mark.slow  # all of it: each environment is a process

TASK = EpisodeTask(id="t", prompt="", messages=(), seed=3, index=0)


def observed(environment: str, *, timeout_s: float = 300.0, **params) -> FirstObservations:
    plugin = Plugin(name=f"tests.unit.deploy.preflight.worlds:{environment}", params=params)
    return first_observations(plugin, TASK, EpisodesConfig(timeout_s=timeout_s))


@pytest.mark.parametrize("greets", [True, False])
def test_a_world_that_is_made_of_the_tasks_seed_is_the_same_for_all(greets):
    assert observed("seeded", greets=greets) == FirstObservations(num_turns=4)


@pytest.mark.parametrize(
    ("environment", "difference"),
    [
        ("unseeded", 'turn 1: {"content": "Remember '),
        ("drawn", 'turn 3: {"content": "lower", "role": "user"} in one episode, and {"content": "higher"'),
        ("of_its_index", 'turn 1: {"content": "You are number 0.", "role": "user"} in one episode, and'),
        ("of_its_index_by_a_raw_prompt", 'turn 1: "You are number 0." in one episode, and "You are number 1."'),
        ("impatient", "turn 2: only one of the episodes has it"),
    ],
)
def test_what_differs_between_two_episodes_of_a_task_is_told(environment, difference):
    assert (observed(environment).difference or "").startswith(difference)


def test_an_environment_that_fails_says_why():
    assert observed("broken") == FirstObservations(
        num_turns=0, failure="environment: KeyError: 'page'", raises_unasked=True
    )


def test_an_environment_that_fails_in_one_of_two_episodes_may_do_better_in_a_run():
    seen = observed("broken_at_first")
    assert seen.failure == "environment: KeyError: 'page'" and not seen.raises_unasked


def test_an_environment_that_is_slow_to_ask_may_have_the_time_in_a_run():
    seen = observed("slow_to_begin", timeout_s=0.2)
    assert seen.failure is not None and not seen.raises_unasked


def test_an_environment_that_does_not_start_is_refused():
    with pytest.raises(ConfigError, match="environment='nowhere' is not there"):
        first_observations(Plugin(name="nowhere"), TASK, EpisodesConfig())

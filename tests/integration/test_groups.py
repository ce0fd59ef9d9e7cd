"""Which groups train, in a real cluster: chosen among candidates, filtered, and compared with what their prompts earned before. The run
is quiet, which is looked at too."""

import re
import subprocess
from collections import Counter

import pytest

from tests.integration.commands import treadwheel
from tests.integration.faults import Run, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = {
    "num_steps": 6,
    "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 6, "seed": 1},
    "buffer": {"groups_per_step": 3, "trajectories_per_group": 2},
    "rollout__extra_trajectories": 2,
    "algorithm": {
        "selection": "max_variance",
        "reward_shaping": [{"name": "overlong_penalty", "max_length": 24, "cache": 8, "penalty": 0.5}],
        "filters": ["zero_variance", {"name": "return_bounds", "low": -0.3, "high": 0.3}],
    },
    "reward": {"judge": "tests.integration.judges:printing"},
    "metrics": {"sinks": ["jsonl", "console"]},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Run, subprocess.CompletedProcess[str]]:
    """The run, and what it said."""
    folder = tmp_path_factory.mktemp("groups")
    file, run = write_run(folder, make_tiny_model(folder / "model"), **SETTINGS), Run(folder / "run")
    said = treadwheel("train", file, f"run_dir={run.path}", "--quiet")
    assert said.returncode == 0, said.stdout + said.stderr
    return run, said


@pytest.fixture(scope="module")
def run(ended) -> Run:
    return ended[0]


def test_every_recorded_group_was_chosen_among_all_that_were_judged(run):
    for step in run.trajectories().values():
        assert set(Counter(step["group_id"].to_pylist()).values()) == {2}
    chosen = {place for step in run.trajectories().values() for place in step["sample_index"].to_pylist()}
    assert chosen == {0, 1, 2, 3}, "the extra trajectories are candidates like the others"
    assert all("buffer/candidate_reward" in numbers for numbers in run.metrics().values())


def test_the_learner_drops_nothing_that_the_cluster_kept(run):
    dropped = Counter(event["reason"] for event in run.events("drop"))
    assert dropped and set(dropped) <= {"zero_variance", "return_bounds"}, dropped
    assert {numbers["learner/trajectories_filtered"] for numbers in run.metrics().values()} == {0.0}
    kept = [numbers["buffer/kept_share"] for numbers in run.metrics().values()]
    assert 0 < min(kept) < 1 and max(kept) <= 1


def test_through_a_pipe_quiet_says_the_end_alone(ended):
    _, said = ended
    others = [line for line in said.stderr.splitlines() if not line.startswith("judges '")]
    assert others == [], "a judge that is tried prints, nobody else"
    assert re.match(r"6 steps in \d+ s; ", said.stdout), said.stdout

"""On a Ray cluster that asks for a token: as a job, with the README's own line, and as a driver that connects.

Each trains a preset, so that both also show that a few steps make the quickstart's model better, whatever the mathematics.
"""

import http.client
import json
import re
import shlex
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import QUICKSTART, ROOT, run, treadwheel
from tests.integration.ray_head import RayHead
from tests.integration.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
NUM_STEPS = 8
SETTINGS = (
    f"num_steps={NUM_STEPS}",
    "optimizer.warmup_steps=0",
    "evaluation.prompts=null",
    "metrics.sinks=[jsonl, ray]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    run_dir: Path
    output: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, float]]:
        return [line for line in self.lines("metrics.jsonl") if "reward/mean" in line]

    def gain(self) -> float:
        """Reward of the last three steps over that of the first two. The warm-up is off: the second is better already."""
        rewards = [step["reward/mean"] for step in self.steps]
        assert len(rewards) == NUM_STEPS
        return sum(rewards[-3:]) / 3 - sum(rewards[:2]) / 2


@pytest.fixture(scope="module")
def dapo(head, tmp_path_factory) -> Trained:
    """As a job."""
    run_dir = tmp_path_factory.mktemp("job") / "dapo"
    job = run(*submission(head.dashboard, f"run_dir={run_dir}", "algorithm={preset: dapo}", *SETTINGS), env=head.env)
    assert job.returncode == 0, job.stdout + job.stderr
    return Trained(run_dir=run_dir, output=job.stdout)


@pytest.fixture(scope="module")
def ppo(head, tmp_path_factory) -> Trained:
    """As a driver that connects, with eight updates a step, the critic alone in the first."""
    run_dir = tmp_path_factory.mktemp("driver") / "ppo"
    algorithm = ("algorithm={preset: ppo}", "algorithm.value.learning_rate=1e-3", "algorithm.value.warmup_steps=1")
    updates = ("learner.epochs=2", "learner.mini_batches=4", "optimizer.learning_rate=2e-4")
    overrides = (f"run_dir={run_dir}", *algorithm, *updates, *SETTINGS)
    result = treadwheel("train", QUICKSTART, *overrides, "--address", head.address, env=head.env)
    assert result.returncode == 0, result.stdout + result.stderr
    return Trained(run_dir=run_dir, output=result.stdout)


def submission(dashboard: str, *overrides: str) -> tuple[str, ...]:
    """The README's `ray job submit ...`, on one line, with another port and overrides at its end."""
    found = re.search(r"^ray job submit .*?[^\\]\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found, "the README shows no `ray job submit`"
    line = found.group().replace("\\\n", " ").strip()
    assert "http://127.0.0.1:8265" in line
    return "bash", "-c", f"{line.replace('http://127.0.0.1:8265', dashboard)} {shlex.join(overrides)}"


@pytest.mark.engine
@pytest.mark.slow
def test_the_line_in_the_readme_trains_and_dapo_raises_the_reward(dapo):
    assert "succeeded" in dapo.output
    assert dapo.gain() >= 0.08


@pytest.mark.engine
@pytest.mark.slow
def test_dapo_trains_on_groups_that_differ_alone(dapo):
    assert {step["learner/groups_without_variance"] for step in dapo.steps} == {0.0}
    assert any(event["kind"] == "drop" and event["reason"] == "zero_variance" for event in dapo.lines("events.jsonl"))


@pytest.mark.engine
@pytest.mark.slow
def test_the_cluster_has_counted_the_drivers_start_and_its_end(head, ppo):
    """Before the driver left it: what is set or counted outside `ray.init` and `ray.shutdown` is lost."""
    until(lambda: {"launched": 1.0, "finished": 1.0}.items() <= counts(head).items())


@pytest.mark.engine
@pytest.mark.slow
def test_ppo_with_several_updates_a_step_raises_the_reward_and_its_critic_learns_what_to_expect(ppo):
    assert ppo.gain() >= 0.15
    warming, *later = ppo.steps
    assert {step["learner/updates"] for step in ppo.steps} == {8.0}
    # The policy that sampled is still the one that learns: its ratios are the engine's rounding.
    assert warming["learner/clip_fraction"] == 0.0 and warming["learner/learning_rate"] == 0.0
    assert all(step["learner/clip_fraction"] > 0.0 and step["updates/clip_fraction/8"] > 0.0 for step in later)
    assert max(step["learner/value_clip_fraction"] for step in ppo.steps) > 0.0
    # Values begin at 0 and come to where returns are.
    biases = [abs(step["learner/value_error_mean"]) for step in ppo.steps]
    assert min(biases) < biases[0] / 4
    assert ppo.steps[-1]["learner/value_mean"] > 0.2
    assert ppo.steps[-1]["learner/value_max"] > ppo.steps[-1]["learner/value_min"]


def test_a_wrong_token_is_refused(head, tmp_path):
    wrong = {**head.env, "RAY_AUTH_TOKEN": "0" * 64}
    job = run(*submission(head.dashboard, f"run_dir={tmp_path / 'run'}"), env=wrong)
    assert job.returncode != 0
    assert re.search(r"\b40[13]\b|[Uu]nauthori[sz]ed|Forbidden|[Ii]nvalid.*token", job.stdout + job.stderr), job.stderr
    assert not (tmp_path / "run").exists()


def test_a_driver_with_a_wrong_token_is_told_so(head, tmp_path):
    wrong = {**head.env, "RAY_AUTH_TOKEN": "0" * 64}
    result = treadwheel("train", QUICKSTART, f"run_dir={tmp_path / 'run'}", "--address", head.address, env=wrong)
    assert result.returncode == 2, result.stdout + result.stderr
    assert head.address in result.stderr
    assert "Traceback" not in result.stderr


def test_more_than_the_cluster_has_is_refused_once_it_is_known(head, tmp_path):
    asked = (f"run_dir={tmp_path / 'run'}", "reward.gpus_per_service=8")
    result = treadwheel("train", QUICKSTART, *asked, "--address", head.address, env=head.env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "8 GPUs asked for, the cluster has" in result.stderr


def test_rays_dashboard_names_run_actor_and_generation_and_says_where_the_run_is(head, ppo):
    """Through its state API, of the driver that connected; one that was submitted has the metadata of its submission."""
    found = asked(head, "/api/v0/actors?detail=true&limit=1000")["data"]["result"]["result"]
    ours = {each["name"]: each["repr_name"] for each in found if each["name"].startswith("ppo/")}
    actors = ("learner-0", "recorder", "reference", "reward", "rollout-0")
    assert ours == {f"ppo/{name}#1": f"ppo/{name}#1" for name in actors}
    jobs = [each["metadata"] for each in asked(head, "/api/jobs/")]
    run_dir = str(ppo.run_dir)
    assert {"run_dir": run_dir, "viewer": f"treadwheel view {run_dir}"} in jobs


def counts(head: RayHead) -> dict[str, float]:
    """Of the run's events, by kind, as the cluster tells them now."""
    targets = [target for group in asked(head, "/api/prometheus/sd") for target in group["targets"]]
    lines = [line for target in targets for line in scraped(target)]
    events = [line for line in lines if line.startswith("ray_treadwheel_events_total") and 'run="ppo-' in line]
    return {found[1]: float(line.rpartition(" ")[2]) for line in events if (found := re.search('kind="(.*?)"', line))}


def scraped(target: str) -> list[str]:
    """Empty where no metrics are: Ray lists the one port of its autoscaler even if another cluster of the machine has it, or had it."""
    try:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=120) as answer:
            return answer.read().decode().splitlines()
    except (OSError, http.client.HTTPException):
        return []


def asked(head: RayHead, path: str) -> Any:
    token = {"Authorization": f"Bearer {head.env['RAY_AUTH_TOKEN']}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{head.dashboard}{path}", headers=token), timeout=120
    ) as answer:
        return json.load(answer)

"""Presets on the real cluster: a few steps of each make the quickstart's model better, whatever its mathematics."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.commands import QUICKSTART, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    run_dir: Path

    @property
    def steps(self) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "reward/mean" in line]

    def gain(self) -> float:
        """Reward of the last three steps over that of the first two. The warm-up is off: the second is better already."""
        rewards = [step["reward/mean"] for step in self.steps]
        assert len(rewards) == NUM_STEPS
        return sum(rewards[-3:]) / 3 - sum(rewards[:2]) / 2


@pytest.fixture(scope="module")
def trained(head, tmp_path_factory):
    """Trains a preset for a few steps, once."""
    done: dict[str, Trained] = {}

    def train(preset: str, *overrides: str) -> Trained:
        if preset not in done:
            run_dir = tmp_path_factory.mktemp("presets") / preset
            result = treadwheel(
                "train",
                QUICKSTART,
                f"run_dir={run_dir}",
                f"num_steps={NUM_STEPS}",
                f"algorithm={{preset: {preset}}}",
                "optimizer.warmup_steps=0",
                "evaluation.prompts=null",
                "metrics.sinks=[jsonl]",
                *overrides,
                "--address",
                head.address,
                env=head.env,
            )
            assert result.returncode == 0, result.stdout + result.stderr
            done[preset] = Trained(run_dir=run_dir)
        return done[preset]

    return train


@pytest.mark.parametrize("preset", ["rloo", "gspo", "cispo", "dapo"])
def test_a_preset_raises_the_reward(preset, trained):
    assert trained(preset).gain() >= 0.08


def test_ppo_raises_the_reward_and_its_critic_learns_what_to_expect(trained):
    ppo = trained("ppo", "algorithm.value.learning_rate=1e-3")
    assert ppo.gain() >= 0.08
    # Values begin at 0 and come to where returns are.
    biases = [abs(step["learner/value_error_mean"]) for step in ppo.steps]
    assert min(biases) < biases[0] / 4
    assert ppo.steps[-1]["learner/value_max"] > ppo.steps[-1]["learner/value_min"] > 0


def test_dapo_trains_on_groups_that_differ_alone(trained):
    dapo = trained("dapo")
    assert {step["learner/groups_without_variance"] for step in dapo.steps} == {0.0}
    events = [json.loads(line) for line in (dapo.run_dir / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "drop" and event["reason"] == "filtered" for event in events)


def test_passports_tell_two_presets_apart(trained):
    result = treadwheel("passport", "diff", trained("rloo").run_dir, trained("gspo").run_dir)
    assert result.returncode == 1
    assert "mathematics.advantage.name: 'rloo' | 'grpo'" in result.stdout
    assert "mathematics.policy_loss.name: 'reinforce' | 'gspo'" in result.stdout
    assert "seed" not in result.stdout

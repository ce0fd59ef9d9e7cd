"""docs/debugging.md: its pictures are there, its settings are those of the runs, and its numbers are the runs' own."""

import re
import statistics
from pathlib import Path

import pytest

from deploy.config.loading import load, read, validated
from deploy.config.yaml_text import parse
from tests.pictures.numbers import kept
from tests.pictures.runs import COMMON, PICTURES, QUICKSTART, RUNS

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "debugging.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"```yaml\n(?P<settings>.*?)```(?:(?!```yaml).)*?pictures/runs/(?P<name>\w+)\.svg", PAGE, re.DOTALL)
)
"""Settings to the name of the run whose picture follows them."""


def test_every_run_has_its_settings_and_its_picture_on_the_page():
    assert sorted(SECTIONS.values()) == sorted(RUNS)
    assert sorted(file.stem for file in PICTURES.iterdir()) == sorted(RUNS)
    assert all(file.stat().st_size < 60_000 for file in PICTURES.iterdir())


@pytest.mark.parametrize("name", RUNS)
def test_the_settings_on_the_page_are_those_of_the_run(name):
    (shown,) = (text for text, run in SECTIONS.items() if run == name)
    shown = shown.replace("my_rewards:", "tests.pictures.judges:")
    own = parse(shown, source="the page")
    common = [setting for setting in COMMON if setting.partition("=")[0] not in own]
    shown_run = validated(merged(read(QUICKSTART), own), common if name != "healthy" else ())
    assert shown_run == load(QUICKSTART, (*COMMON, *RUNS[name].settings))


@pytest.mark.parametrize("page", ["debugging", "asynchronous", "passport", "ppo", "lora"])
def test_every_metric_that_a_page_names_is_explained(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    named = {
        *re.findall(r"`((?:learner|reward|eval|tokens|mismatch|staleness|buffer|time|weights|rollout)/\w+)`", text)
    }
    explained = (DOCS / "metrics.md").read_text(encoding="utf-8")
    parts = {f"reward/{part}" for part in ("long", "right")}
    assert [name for name in sorted(named - parts) if f"`{name}`" not in explained] == []


def test_the_healthy_run_learns():
    healthy = kept("healthy")
    assert end("healthy", "reward/mean") > 0.85
    assert healthy["eval/accuracy"][0] < 0.5 < 0.95 < healthy["eval/accuracy"][30]
    assert end("healthy", "learner/entropy_mean") < healthy["learner/entropy_mean"][1] / 4
    assert max(healthy["learner/clip_fraction"].values()) == 0


def test_with_a_learning_rate_too_high_the_kl_jumps_before_the_reward_is_gone():
    kl, reward = kept("rate_too_high")["learner/kl_reference_k3_mean"], kept("rate_too_high")["reward/mean"]
    assert kl[4] > 20 * kept("healthy")["learner/kl_reference_k3_mean"][4] and reward[4] > 0.1
    assert end("rate_too_high", "reward/mean") < 0.01
    assert end("rate_too_high", "tokens/truncated_share") == 1


def test_with_a_learning_rate_too_low_nothing_moves():
    assert max(kept("rate_too_low")["learner/kl_reference_k3_mean"].values()) < 0.01
    assert 0.35 < end("rate_too_low", "reward/mean") < 0.5
    assert end("rate_too_low", "learner/gradient_norm") > 0.7


def test_prompts_that_are_too_hard_leave_no_group_with_spread():
    assert statistics.median(kept("too_hard")["learner/groups_without_variance"].values()) == 64
    healthy = statistics.median(kept("healthy")["learner/gradient_norm"].values())
    assert statistics.median(kept("too_hard")["learner/gradient_norm"].values()) < healthy / 100


def test_completions_that_are_cut_off_hold_the_accuracy_down():
    assert min(kept("truncated")["tokens/truncated_share"].values()) > 0.85
    assert max(kept("truncated")["eval/accuracy"].values()) == pytest.approx(0.4, abs=0.01)


def test_a_penalty_that_the_learner_leaves_out_is_a_mismatch_that_clips():
    assert 0.2 < end("mismatch", "mismatch/mean_abs_nats") < 0.45
    assert max(kept("healthy")["mismatch/mean_abs_nats"].values()) < 1e-6
    clipped = kept("mismatch")["learner/clip_fraction"].values()
    assert 0.09 < min(clipped) < max(clipped) < 0.19


def test_a_reward_for_length_is_earned_before_right_answers_are():
    assert kept("hacking")["reward/long"][20] > 0.95
    assert end("hacking", "reward/right") < end("healthy", "reward/mean") - 0.1
    assert end("hacking", "tokens/completion_mean") > 3.9 > 3.3 > kept("hacking")["tokens/completion_mean"][1]


def test_old_samples_without_a_correction_teach_nothing():
    stale = kept("stale")
    assert [stale["staleness/mean"][step] for step in range(9, 21)] == [8] * 12
    assert 1.1 < max(stale["learner/kl_rollout_k3_mean"].values()) < 1.2
    assert stale["eval/accuracy"][20] < 0.31 < 0.48 < stale["eval/accuracy"][0]
    assert kept("healthy")["eval/accuracy"][20] > 0.94


def test_a_correction_makes_old_samples_teach():
    corrected = kept("corrected")
    assert [corrected["staleness/mean"][step] for step in range(9, 21)] == [8] * 12
    assert corrected["eval/accuracy"][20] > 0.81


def end(name: str, metric: str) -> float:
    """Mean of the last five steps: one step has too few prompts to say much."""
    return statistics.fmean(list(kept(name)[metric].values())[-5:])


def merged(values: dict, others: dict) -> dict:
    """Settings of `others` in place of those of `values`, section by section."""
    return values | {
        name: merged(values[name], other) if isinstance(other, dict) and isinstance(values.get(name), dict) else other
        for name, other in others.items()
    }

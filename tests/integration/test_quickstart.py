"""The quickstart as a newcomer runs it: one command, and a language model that gets better before their eyes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from cluster.record.run_directory import RunDirectory
from deploy.viewer.pages.trajectory import TokensOfStep
from deploy.viewer.runs import Run
from deploy.viewer.steps import open_step
from tests.integration.commands import QUICKSTART, Background, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    run_dir: Path
    exit_code: int
    output: str
    left_behind: list[str]

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir / name).read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Finished]:
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    with Background("train", QUICKSTART, f"run_dir={run_dir}") as command:
        exit_code, left_behind = command.exit_code(), command.left_behind()
        yield Finished(run_dir=run_dir, exit_code=exit_code, output=command.output, left_behind=left_behind)


def test_it_ends_well_and_leaves_no_process_behind(finished):
    assert finished.exit_code == 0, finished.output
    assert finished.left_behind == []


def test_the_model_learns_what_it_did_badly(finished):
    summary = finished.json("summary.json")
    assert summary["reward_first"] <= 0.5
    assert summary["reward_last"] >= 0.9
    assert summary["eval_last"] >= max(0.85, summary["eval_first"] + 0.25)


def test_its_summary_accounts_for_the_whole_run(finished):
    summary = finished.json("summary.json")
    lines = [json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["policy_version"] for line in steps] == list(range(1, 81))
    assert summary["num_steps"] == 80
    assert summary["sampled_tokens"] == sum(line["tokens/sampled"] for line in steps)
    assert 0 < summary["trained_tokens"] <= summary["sampled_tokens"]
    assert summary["seconds_to_first_step"] > 0
    assert summary["train_seconds"] == pytest.approx(sum(line["time/step_s"] for line in steps))


def test_it_shows_both_evaluations_and_where_the_curve_is(finished):
    summary = finished.json("summary.json")
    assert f"held-out accuracy: {summary['eval_first']:.3f} -> {summary['eval_last']:.3f}" in finished.output
    assert str(finished.run_dir) in finished.output
    assert (finished.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_its_report_and_its_models_card_tell_the_same(finished):
    last = finished.json("summary.json")["eval_last"]
    report = (finished.run_dir / "report.html").read_text()
    assert 'data-state="finished">finished<' in report and f"→ {last:.3f}" in report
    assert "Samples before and after" in report and "There are no samples" not in report
    card = ModelCard((finished.run_dir / "checkpoints" / "step-000080" / "model" / "README.md").read_text())
    assert f"| {last:.3f} ± " in card.text and card.data.to_dict()["license"] == "apache-2.0"


def test_without_a_terminal_every_step_is_a_plain_line(finished):
    steps = [line for line in finished.output.splitlines() if line.startswith("step ") and "reward" in line]
    assert len(steps) == 80
    assert "\x1b" not in finished.output


def test_its_passport_says_what_was_computed(finished):
    passport = finished.json("passport.json")
    assert passport["mathematics"]["advantage"]["name"] == "grpo"
    assert passport["versions"]["torch"]
    assert treadwheel("passport", "diff", finished.run_dir, finished.run_dir).returncode == 0


def test_every_version_was_attested_before_it_served(finished):
    events = [json.loads(line) for line in (finished.run_dir / "events.jsonl").read_text().splitlines()]
    assert [each["policy_version"] for each in events if each["kind"] == "broadcast"] == list(range(1, 81))
    assert [each for each in events if each["kind"] in ("failure", "mismatch_alarm")] == []


def test_verify_finds_it_clean(finished):
    result = treadwheel("verify", finished.run_dir)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("80 steps, 5120 groups, 40960 trajectories, ")
    assert result.stdout.endswith(" checkpoints: clean\n")


def test_info_says_that_it_is_finished(finished):
    result = treadwheel("info", finished.run_dir)
    assert result.returncode == 0, result.stderr
    assert "80 of 80" in result.stdout
    assert "the run is finished" in result.stdout


def test_its_checkpoint_scores_in_an_evaluation_as_it_did_in_the_run(finished):
    result = treadwheel("eval", finished.run_dir)
    assert result.returncode == 0, result.stderr
    scores = result.stdout.split()
    accuracy = float(scores[scores.index("eval/accuracy") + 1])
    # Greedy, the same weights and questions; another process may break a tie of log-probs the other way.
    assert accuracy == pytest.approx(finished.json("summary.json")["eval_last"], abs=0.01)


@pytest.mark.exhaustive
def test_its_model_teaches_an_untrained_one_without_any_reward(finished, tmp_path):
    """On-policy distillation: the reverse KL to the teacher falls, and the reward, which nothing reads, rises with it."""
    teacher = max((finished.run_dir / "checkpoints").glob("step-*")) / "model"
    taught = treadwheel(
        "train",
        QUICKSTART,
        f"run_dir={tmp_path / 'run'}",
        f"reference.path={teacher}",
        "algorithm.preset=on_policy_distillation",
        "num_steps=15",
        "evaluation.prompts=null",
    )
    assert taught.returncode == 0, taught.stdout + taught.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kls = [step["learner/kl_reference_k1_mean"] for step in steps]
    rewards = [step["reward/mean"] for step in steps]
    assert sum(kls[-3:]) < 0.5 * sum(kls[:3])
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.15
    differ = treadwheel("passport", "diff", finished.run_dir, tmp_path / "run")
    assert differ.returncode == 1 and "mathematics.advantage.name: 'grpo' | 'none'" in differ.stdout
    assert "seed" not in differ.stdout


def test_every_token_of_a_step_can_be_looked_at(finished):
    """Texts by the tokenizer of the run's checkpoint, and what the learner saw of the first groups: the default."""
    run = Run("run", RunDirectory(str(finished.run_dir)))
    step = open_step(run, 80)
    tokens, groups = TokensOfStep(run, step), step.groups()
    assert (len(groups), len(groups[0].trajectories)) == (64, 8)
    for group in groups:
        for sample, text in step.completions(group.ticket_index).items():
            seen = tokens.of(group.ticket_index, sample)
            texts = [each for at, each in enumerate(seen["texts"]) if at not in seen["special"]]
            assert "".join(texts) == text
            assert (seen["learned"] is None) is (group not in groups[:8])
            if seen["learned"]:
                assert seen["learned"]["policy_logprobs"] == pytest.approx(seen["rollout"], abs=0.01)

"""What cannot work ends before anything starts: exit code 2, one error with the field, the value and the way out, no traceback.

`test_cli.py` has the mistakes one by one; here are those of mathematics, and the installed command on the quickstart.
"""

import pytest
import ray
from typer.testing import CliRunner

from deploy.cli import app
from tests.integration.commands import QUICKSTART, ROOT, treadwheel


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("override", "named", "way_out"),
    [
        ("buffer.trajectories_per_group=1", "rloo", "at least 2"),
        ("algorithm={advantage: gae}", "advantage='gae' needs values", "add a `value:` section"),
        ("algorithm={preset: ppo, value: null}", "preset='ppo' with value=None", "drop `value`, or use preset 'grpo'"),
        ("algorithm={preset: gspo, policy_loss: cispo}", "policy_loss='cispo'", "drop one of the two"),
        ("algorithm={preset: dr_grpo, advantage: grpo}", "advantage='grpo'", "drop one of the two"),
        ("algorithm={preset: grop}", "algorithm.preset='grop'", "choose one of grpo"),
        ("algorithm={policy_loss: {name: ppo_clip, epsilon: 0.2}}", "epsilon=0.2", "epsilon_low"),
        ("algorithm={policy_loss: {name: ppo_clip, epsilon_low: -0.1}}", "epsilon_low=-0.1", "epsilon_low"),
        ("algorithm={kl: {loss: {coefficient: -1}}}", "algorithm.kl.loss.coefficient=-1", "greater than 0"),
        ("algorithm={kl: {loss: {estimator: k4}}}", "algorithm.kl.loss.estimator='k4'", "'k2', 'k3'"),
        (
            "algorithm={kl: {coefficient: 0.1}}",
            "algorithm.kl: coefficient: a KL is one of",
            "write kl: {loss: {coefficient:",
        ),
        ("algorithm={aggregation: mean}", "aggregation='mean'", "token_mean"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate=0", "greater than 0"),
    ],
)
def test_mathematics_that_cannot_work_are_refused_by_name(override, named, way_out, tmp_path):
    overrides = ["algorithm={preset: rloo}", override] if "per_group" in override else [override]
    few = ("prompts.size=8", "evaluation.prompts=null")
    result = CliRunner().invoke(app, ["check", QUICKSTART, f"run_dir={tmp_path / 'run'}", *few, *overrides])
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert way_out in result.stderr
    assert not ray.is_initialized()
    assert not (tmp_path / "run").exists()


def test_the_installed_command_ends_with_one_line_after_all_that_it_imports(tmp_path):
    result = treadwheel("train", QUICKSTART, f"run_dir={tmp_path / 'run'}", "rollout.num_workers=1000")
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("treadwheel: ")
    assert "rollout.num_workers=1000: no way to place" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()

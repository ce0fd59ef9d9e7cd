"""Each alert fires where it should and is silent where it should be: Prometheus's own promtool says so, on made-up series."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.contracts.config import RunConfig
from cluster.contracts.settings import fields
from deploy.monitoring.alerts import ALERTS, groups
from deploy.monitoring.files import FOLDER, files
from deploy.monitoring.series import registry
from tests.programs import needs

ALIVE = {"last_step_time": "0+60x2000"}
"""A run that learns a step a minute."""

GAP = {"last_step_time": "0+60x100 _x60 9660+60x60"}
"""Of which Prometheus missed an hour."""


@dataclass(frozen=True, kw_only=True)
class Case:
    alert: str
    fires: bool
    why: str
    series: dict[str, str]
    """Values a minute in promtool's notation, by metric, or by kind for events; `name@driver` is another driver's."""
    at: str = "60m"


def fires(alert: str, why: str, series: dict[str, str], **more) -> Case:
    return Case(alert=f"Treadwheel{alert}", fires=True, why=why, series=series, **more)


def silent(alert: str, why: str, series: dict[str, str], **more) -> Case:
    return Case(alert=f"Treadwheel{alert}", fires=False, why=why, series=series, **more)


ASYNCHRONOUS = {**ALIVE, "staleness/bound": "2x100", "time/step_s": "100x100"}
JUDGED = {**ALIVE, "buffer/num_judged": "100x100", "learner/trajectories": "90x100", "learner/failed_rewards": "10x100"}
CHOSEN = {
    **ALIVE,
    "buffer/num_judged": "1000x100",
    "learner/trajectories": "100x100",
    "learner/failed_rewards": "0x100",
}
"""`algorithm.selection` took a tenth."""

CASES = [
    fires("NoProgress", "nothing for an hour", {"last_step_time": "0x60"}),
    silent("NoProgress", "it learns", ALIVE),
    silent("NoProgress", "a step takes 20 minutes", {"last_step_time": "0x60", "time/step_s": "1200x60"}, at="40m"),
    silent(
        "NoProgress",
        "an evaluation takes 20 minutes",
        {"last_step_time": "0x60", "time/step_s": "60x60", "time/eval_s": "1200x60"},
        at="40m",
    ),
    fires(
        "NoProgress",
        "evaluations take a minute",
        {"last_step_time": "0x60", "time/step_s": "60x60", "time/eval_s": "60x60"},
    ),
    fires("RunEndedAbnormally", "failed", {"last_step_time": "0+60x30 stale", "failed": "_x29 1x90"}),
    fires("RunEndedAbnormally", "killed without a word", {"last_step_time": "0+60x30 stale", "launched": "1x90"}),
    silent("RunEndedAbnormally", "finished", {"last_step_time": "0+60x30 stale", "finished": "_x29 1x90"}),
    silent(
        "RunEndedAbnormally",
        "finished, and its head was deleted an hour later",
        {"last_step_time": "0+60x30 stale", "finished": "_x29 1x60 stale"},
        at="2h",
    ),
    silent("RunEndedAbnormally", "stopped", {"last_step_time": "0+60x30 stale", "stopped": "_x29 1x90"}),
    silent(
        "RunEndedAbnormally",
        "preempted, and its pod ended before its last report",
        {"last_step_time": "0+60x30 stale", "preempted": "_x29 1x1 stale"},
    ),
    silent(
        "RunEndedAbnormally",
        "another driver has taken over, and finished",
        {
            "last_step_time": "0+60x20 stale",
            "failed": "_x20 1x90",
            "last_step_time@2": "_x25 1500+60x15 stale",
            "finished@2": "_x39 1x90",
        },
    ),
    fires(
        "RunEndedAbnormally",
        "it was taken up after it had finished, and killed",
        {
            "last_step_time": "0+60x20 stale",
            "finished": "_x20 1x90",
            "last_step_time@2": "_x25 1500+60x15 stale",
            "launched@2": "_x25 1x90",
        },
    ),
    fires(
        "NotResumed",
        "nobody started it again",
        {"last_step_time": "0+60x10 stale", "preempted": "_x9 1x90", "stopped": "_x10 1x90"},
    ),
    silent(
        "NotResumed",
        "it has been away for ten minutes",
        {"last_step_time": "0+60x50 stale", "preempted": "_x49 1x90", "stopped": "_x50 1x90"},
    ),
    silent("NotResumed", "it was stopped", {"last_step_time": "0+60x10 stale", "stopped": "_x10 1x90"}),
    silent(
        "NotResumed",
        "the next driver finished",
        {
            "last_step_time": "0+60x10 stale",
            "preempted": "_x9 1x90",
            "last_step_time@2": "_x12 720+60x5 stale",
            "finished@2": "_x17 1x90",
        },
    ),
    fires("LearnerStarved", "it waits for 60 of 100 s", {**ASYNCHRONOUS, "buffer/learner_wait_s": "60x100"}),
    silent("LearnerStarved", "for 40 of 100 s", {**ASYNCHRONOUS, "buffer/learner_wait_s": "40x100"}),
    silent(
        "LearnerStarved",
        "a synchronous run always waits",
        {**ASYNCHRONOUS, "staleness/bound": "0x100", "buffer/learner_wait_s": "60x100"},
    ),
    fires("WorkersMissing", "3 of 4 serve", {**ALIVE, "rollout/num_wanted": "4x100", "rollout/num_workers": "3x100"}),
    silent(
        "WorkersMissing",
        "the fourth came after ten minutes",
        {**ALIVE, "rollout/num_wanted": "4x100", "rollout/num_workers": "3x10 4x90"},
    ),
    fires("WorkerFlapping", "five failures in ten minutes", {**ALIVE, "failure": "_x50 1+1x4 5x50"}),
    silent(
        "WorkerFlapping", "five failures in five hours", {**ALIVE, "failure": "1x60 2x60 3x60 4x60 5x60"}, at="290m"
    ),
    fires(
        "WorkerFlapping",
        "five failures of a driver after one that had as many",
        {
            "last_step_time": "0+60x40 stale",
            "failure": "1+1x4 5x36 stale",
            "last_step_time@2": "_x42 2520+60x90",
            "failure@2": "_x45 1+1x4 5x50",
        },
        at="65m",
    ),
    fires("RewardErrors", "10 of 100", {**JUDGED, "reward/num_errors": "10x100"}),
    silent("RewardErrors", "4 of 100", {**JUDGED, "reward/num_errors": "4x100"}),
    silent("RewardErrors", "40 of 1000 candidates", {**CHOSEN, "reward/num_errors": "40x100"}),
    fires("RewardErrors", "100 of 1000 candidates", {**CHOSEN, "reward/num_errors": "100x100"}),
    fires("RewardTimeouts", "10 of 100", {**JUDGED, "reward/num_timeouts": "10x100"}),
    silent("RewardTimeouts", "10 of 100, in one step", {**JUDGED, "reward/num_timeouts": "0x50 10x4 0x50"}),
    fires("StalenessAtBound", "all groups are 2 steps old", {**ASYNCHRONOUS, "staleness/mean": "2x100"}),
    silent("StalenessAtBound", "some are younger", {**ASYNCHRONOUS, "staleness/mean": "1.5x100"}),
    silent(
        "StalenessAtBound",
        "a synchronous run is at its bound of 0",
        {**ALIVE, "staleness/bound": "0x90", "staleness/mean": "0x90"},
    ),
    fires(
        "CanaryNearTolerance",
        "0.6 of it",
        {**ALIVE, "weights/canary_error": "6x100", "weights/canary_tolerance": "10x100"},
    ),
    silent(
        "CanaryNearTolerance",
        "0.4 of it",
        {**ALIVE, "weights/canary_error": "4x100", "weights/canary_tolerance": "10x100"},
    ),
    fires("MismatchRising", "from 0.01 to 0.05 nats", {**ALIVE, "mismatch/mean_abs_nats": "0.01x60 0.05x90"}, at="85m"),
    silent("MismatchRising", "it was always 0.05", {**ALIVE, "mismatch/mean_abs_nats": "0.05x150"}, at="85m"),
    silent(
        "MismatchRising", "from nothing to little", {**ALIVE, "mismatch/mean_abs_nats": "0.0001x60 0.001x90"}, at="85m"
    ),
    fires("UpdatesSkipped", "three in a row", {**ALIVE, "learner/skipped_in_a_row": "0x58 3x10"}),
    silent("UpdatesSkipped", "a single one", {**ALIVE, "learner/skipped_in_a_row": "0x58 1x10"}),
    fires("KlRunaway", "from the policy that sampled", {**ALIVE, "learner/kl_old_k3_mean": "0.2x90"}),
    fires(
        "KlRunaway",
        "from the reference",
        {**ALIVE, "learner/kl_old_k3_mean": "0x90", "learner/kl_reference_k3_mean": "2x90"},
    ),
    silent("KlRunaway", "for a step", {**ALIVE, "learner/kl_old_k3_mean": "0x54 0.2x4 0x40"}),
    fires("EntropyCollapse", "from 1 to 0.05 nats", {**ALIVE, "learner/entropy_mean": "1x30 0.05x90"}),
    silent("EntropyCollapse", "from 1 to 0.5 nats", {**ALIVE, "learner/entropy_mean": "1x30 0.5x90"}),
    fires("Truncated", "40 %", {**ALIVE, "tokens/truncated_share": "0.4x90"}),
    silent("Truncated", "20 %", {**ALIVE, "tokens/truncated_share": "0.2x90"}),
    fires("CheckpointStale", "none for seven hours", {**ALIVE, "checkpoint": "1x600"}, at="430m"),
    silent(
        "CheckpointStale", "one an hour", {**ALIVE, "checkpoint": "1x59 2x59 3x59 4x59 5x59 6x59 7x59 8x59"}, at="430m"
    ),
    silent(
        "CheckpointStale",
        "the run is over",
        {"last_step_time": "0+60x30 stale", "finished": "_x30 1x600", "checkpoint": "1x600"},
        at="430m",
    ),
    fires("CheckpointStale", "the run never saved", ALIVE, at="430m"),
    silent(
        "CheckpointStale",
        "of two drivers the second has saved as often as the first",
        {
            "last_step_time": "0+60x240 stale",
            "checkpoint": "_x60 1x60 2x60 3x60 stale",
            "last_step_time@2": "_x250 15000+60x400",
            "checkpoint@2": "_x300 1x60 2x60 3x200",
        },
        at="560m",
    ),
    silent("CheckpointStale", "a run of five hours never saved", ALIVE, at="300m"),
    fires("CheckpointFailed", "the first one", {**ALIVE, "checkpoint_failed": "_x40 1x90"}),
    fires("CheckpointFailed", "in the run's first hour", {**ALIVE, "checkpoint_failed": "_x20 1x90"}, at="30m"),
    silent(
        "CheckpointFailed", "before Prometheus was away", {**GAP, "checkpoint_failed": "_x20 1x80 _x60 1x60"}, at="190m"
    ),
    silent("CheckpointFailed", "before Prometheus was there", {**ALIVE, "checkpoint_failed": "1x90"}, at="30m"),
    fires("CheckpointFailed", "after Prometheus was away", {**GAP, "checkpoint_failed": "_x170 1x60"}, at="190m"),
    silent("CheckpointFailed", "two hours ago", {**ALIVE, "checkpoint_failed": "_x40 1x200"}, at="160m"),
    fires("StorageFailing", "it took no lines", {**ALIVE, "storage_failed": "_x40 1x90"}),
    silent("StorageFailing", "two hours ago", {**ALIVE, "storage_failed": "_x40 1x200"}, at="160m"),
    fires("BufferFull", "95 %", {**ALIVE, "buffer/size_bytes": "95x90", "buffer/max_size_bytes": "100x90"}),
    silent("BufferFull", "80 %", {**ALIVE, "buffer/size_bytes": "80x90", "buffer/max_size_bytes": "100x90"}),
    fires("EvaluationRegressed", "from 0.8 to 0.5", {**ALIVE, "eval/reward": "0.8x40 0.5x90"}),
    silent(
        "EvaluationRegressed",
        "from one success of 256 to none",
        {**ALIVE, "eval/reward": "0.0039x40 0x90", "eval/reward_stderr": "0.0039x40 0x90"},
    ),
    fires(
        "EvaluationRegressed",
        "by more than twice its error",
        {**ALIVE, "eval/reward": "0.8x40 0.5x90", "eval/reward_stderr": "0.05x130"},
    ),
    silent("EvaluationRegressed", "from 0.8 to 0.7", {**ALIVE, "eval/reward": "0.8x40 0.7x90"}),
    silent("EvaluationRegressed", "of a reward below 0, from -10 to -9", {**ALIVE, "eval/reward": "-10x40 -9x90"}),
    fires("RewardHeld", "for ten minutes", {**ALIVE, "reward_held": "_x50 1x90"}),
    silent("RewardHeld", "it goes on again", {**ALIVE, "reward_held": "_x40 1x90", "reward_resumed": "_x55 1x90"}),
    silent(
        "RewardHeld",
        "it was a driver before this one",
        {"last_step_time": "0+60x40 stale", "reward_held": "_x30 1x90", "last_step_time@2": "_x45 2700+60x90"},
    ),
]


def _series(name: str, values: str) -> dict[str, str]:
    name, _, driver = name.partition("@")
    labels = f'run="r", WorkerId="{driver or 1}"'
    if name in registry():
        return {"series": f"ray_treadwheel_{name.replace('/', '_')}{{{labels}}}", "values": values}
    return {"series": f'ray_treadwheel_events_total{{{labels}, kind="{name}"}}', "values": values}


@needs("promtool", package="prometheus")
def test_each_fires_where_it_should_and_nowhere_else(tmp_path):
    """Each is alone in its file: promtool evaluates all rules of a file, every minute of each case."""
    (group,) = groups()
    for rule in group["rules"]:
        (tmp_path / f"{rule['alert']}.yaml").write_text(yaml.safe_dump({"groups": [{**group, "rules": [rule]}]}))
        tests = [_test_of(case) for case in CASES if case.alert == rule["alert"]]
        (tmp_path / f"{rule['alert']}.tests.yaml").write_text(
            yaml.safe_dump({"rule_files": [f"{rule['alert']}.yaml"], "evaluation_interval": "1m", "tests": tests})
        )
    command = ["promtool", "test", "rules", *sorted(file.name for file in tmp_path.glob("*.tests.yaml"))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("SUCCESS") == len(ALERTS)


def _test_of(case: Case) -> dict[str, Any]:
    return {
        "name": f"{case.alert} {'fires' if case.fires else 'is silent'}: {case.why}",
        "interval": "1m",
        "input_series": [_series(name, values) for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (alertname, run) (ALERTS{{alertstate="firing", alertname="{case.alert}"}})',
                "eval_time": case.at,
                "exp_samples": [{"labels": f'{{alertname="{case.alert}", run="r"}}', "value": 1}] * case.fires,
            }
        ],
    }


def test_each_has_a_case_where_it_fires_and_one_where_it_is_silent():
    cases = {(case.alert, case.fires) for case in CASES}
    assert cases == {(alert.name, is_firing) for alert in ALERTS for is_firing in (True, False)}


@needs("promtool", package="prometheus")
def test_prometheus_takes_the_shipped_files(tmp_path):
    for name in ("alerts.yaml", "prometheus.yml"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "ray-token").write_text("secret")
    ended = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_advice_names_settings_that_there_are():
    known = {name for name, _ in fields(RunConfig)} | registry().keys() | {"algorithm.corrections"}
    named = {name for alert in ALERTS for name in re.findall(r"`([a-z_]+[./][a-z_./]+)(?:: \w+)?`", alert.advice)}
    assert len(named) > 20 and named - known == set()


def test_what_is_committed_is_what_is_made():
    """`python -m deploy.monitoring` writes it."""
    for name, content in files().items():
        assert Path(FOLDER / name).read_text(encoding="utf-8") == content, name

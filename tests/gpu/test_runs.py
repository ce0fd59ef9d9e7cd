"""Whole runs on one GPU that learner and engine share: the quickstart learns, and half a billion parameters train in bfloat16."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import QUICKSTART, treadwheel
from tests.models import half_a_billion

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(900)]

SHARED = (
    *("learner.gpus_per_rank=0.4", "rollout.gpus_per_worker=0.4", "reference.gpus=0.2"),
    "rollout.gpu_memory_utilization=0.35",
)
"""One GPU between the actors of a run."""
COLOCATED = ("rollout.colocated=true", "rollout.gpu_memory_utilization=0.8")
MISMATCH = 0.03
"""Nats, mean: by which engine and learner may differ in bfloat16, with logits in float32 on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


def ended(file: Path | str, run_dir: Path, *overrides: str) -> Ended:
    result = treadwheel("train", file, f"run_dir={run_dir}", *SHARED, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    return Ended(run_dir=run_dir)


def test_the_quickstart_learns_as_it_does_on_a_cpu(tmp_path: Path):
    run = ended(QUICKSTART, tmp_path / "run")
    assert run.summary["reward_first"] <= 0.5
    assert run.summary["reward_last"] >= 0.9
    assert run.summary["eval_last"] >= max(0.85, run.summary["eval_first"] + 0.25)
    assert [each for each in run.lines("events.jsonl") if each["kind"] in ("failure", "mismatch_alarm")] == []
    result = treadwheel("verify", run.run_dir)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_colocated_run_learns_while_engine_and_learner_have_the_gpu_in_turn(tmp_path: Path):
    """Together they would take more than there is: the engine alone has four fifths."""
    run = ended(QUICKSTART, tmp_path / "run", "num_steps=20", "checkpoint.every_steps=5", *COLOCATED)
    assert [step["policy_version"] for step in run.lines("metrics.jsonl") if "reward/mean" in step] == [*range(1, 21)]
    assert [each for each in run.lines("events.jsonl") if each["kind"] in ("failure", "mismatch_alarm")] == []
    result = treadwheel("verify", run.run_dir)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module", params=["object_store", "collective"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    folder = tmp_path_factory.mktemp("half_a_billion")
    settings = {
        "num_steps": 2,
        "model": {"path": str(half_a_billion(folder / "model")), "dtype": "bfloat16", "max_context": 256},
        "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 200, "seed": 1},
        "reward": {"judge": "tests.benchmarks._chance:chance"},
        "sampling": {"max_tokens": 64},
        "buffer": {"groups_per_step": 8, "trajectories_per_group": 8},
        "learner": {"max_tokens_per_micro_batch": 4096},
        "algorithm": {"kl": {"loss": {"coefficient": 0.01}}},
        "weights": {"transport": request.param},
        "checkpoint": {"every_steps": None, "every_s": None},
        "metrics": {"sinks": ["jsonl"]},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    yield ended(folder / "run.yaml", folder / "run")


def test_half_a_billion_parameters_train_two_steps_in_bfloat16(trained: Ended):
    steps = trained.lines("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == [1, 2]
    assert all(step["learner/tokens"] > 0 and 0 < step["learner/gradient_norm"] < 1e4 for step in steps)
    assert [event["policy_version"] for event in trained.lines("events.jsonl") if event["kind"] == "broadcast"] == [
        1,
        2,
    ]


def test_engine_and_learner_compute_the_same_log_probs_in_bfloat16(trained: Ended):
    """Of what the learner was given, and of the weights that it gave back."""
    for step in trained.lines("metrics.jsonl"):
        assert step["mismatch/off_policy_steps"] == 0
        assert step["mismatch/mean_abs_nats"] < MISMATCH and step["weights/canary_error"] < MISMATCH

"""Step time of one run, synchronous and with 1, 2, 4 off-policy steps, against max(sampling, learning); and what updates cost workers.

One rollout worker and one learner rank on a core each, brought up once: the same actors serve every bound, each from where the last
one ended.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.controller import train
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from deploy import launch
from deploy.cluster_up import start_up
from deploy.cluster_up.connection import connected
from deploy.config.loading import validated
from tests.models import make_tiny_model

WARM_UP, MEASURED = 4, 16
"""Steps of each bound."""
BOUNDS = (0, 1, 2, 4)


def rows() -> list[dict[str, Any]]:
    """Three rows against the ideal, and the pause of a weight update as a share of the step."""
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", hidden_size=256)
        steps = asyncio.run(_measure(_config(model, Path(folder) / "run")))
    return _rows(steps)


def _config(model: Path, run_dir: Path) -> RunConfig:
    return validated(
        {
            "run_dir": str(run_dir),
            "num_steps": (WARM_UP + MEASURED) * len(BOUNDS),
            "model": {"path": str(model), "dtype": "float32"},
            "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 500, "seed": 1},
            "reward": {"judge": "tests.integration.judges:digit_share"},
            "sampling": {"max_tokens": 64},
            # The placement is for the largest bound: learner and worker have a core each.
            "buffer": {"groups_per_step": 16, "trajectories_per_group": 8, "max_off_policy_steps": max(BOUNDS)},
            "rollout": {"num_threads": 1, "kv_cache_bytes": 256 * 1024**2, "max_concurrent_sequences": 128},
            "learner": {"num_threads": 1},
            "metrics": {"sinks": []},
        }
    )


class _Steps:
    """A log that keeps the numbers."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def pending(self, version: int, metrics: dict[str, float]) -> None: ...

    async def written(self, *, within_s: float | None = None) -> None: ...

    def keep_errors(self) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...


async def _measure(config: RunConfig) -> dict[int, list[dict[str, float]]]:
    measured: dict[int, list[dict[str, float]]] = {}
    run_dir = RunDirectory(config.run_dir)
    ledger = Ledger(run_dir)
    office = launch.ticket_office(config, ledger)
    async with connected(None), start_up.cluster(config, run_dir, ledger, _Steps(), office=office) as cluster:
        for bound in BOUNDS:
            log = _Steps()
            until = cluster.learner.version + WARM_UP + MEASURED
            buffer = config.buffer.model_copy(update={"max_off_policy_steps": bound})
            here = config.model_copy(update={"num_steps": until, "buffer": buffer})
            await train(
                here,
                rollouts=cluster.production,
                fleet=cluster.production.fleet,
                learner=cluster.learner,
                buffer=launch.make_buffer(here, version=cluster.learner.version, next_index=ledger.next_index),
                weights=cluster.weights,
                log=log,
                timesheet=cluster.timesheet,
            )
            # The last steps of an asynchronous run have nothing left to overlap with.
            measured[bound] = log.steps[WARM_UP : len(log.steps) - bound]
    return measured


def _rows(measured: dict[int, list[dict[str, float]]]) -> list[dict[str, Any]]:
    alone = measured[0]
    sampling_s = median(step["buffer/learner_wait_s"] for step in alone)
    learning_s = median(step["time/step_s"] - step["buffer/learner_wait_s"] for step in alone)
    ideal_s = max(sampling_s, learning_s)
    sync_s = median(step["time/step_s"] for step in alone)
    baseline = f"max(sampling {sampling_s:.3f} s, learning {learning_s:.3f} s); on-policy takes {sync_s:.3f} s"
    found = [
        {
            "name": f"asynchrony, {bound} off-policy steps",
            "value": mean(step["time/step_s"] for step in steps),
            "unit": "s/step",
            "baseline": baseline,
            "baseline_value": ideal_s,
            "ratio": mean(step["time/step_s"] for step in steps) / ideal_s,
            "aim": "<= 1.10",
        }
        for bound, steps in measured.items()
        if bound
    ]
    pause = [
        step["weights/pause_s"] / step["time/step_s"] for bound, steps in measured.items() if bound for step in steps
    ]
    return [
        *found,
        {
            "name": "asynchrony, pause of a worker for new weights",
            "value": mean(pause),
            "unit": "share",
            "aim": "< 0.03",
        },
    ]


if __name__ == "__main__":
    print(rows())

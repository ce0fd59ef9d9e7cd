"""Two learner ranks (FSDP2 over gloo, a process each) compute what one computes, and restore each other's checkpoints."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.models import make_tiny_model

NUM_STEPS = 5
SCRIPT = """
import json, sys
import torch
from cluster.contracts.config import RunConfig
from learner.learner import Learner
from tests.unit.learner.trajectories import make_group

task = json.loads(sys.argv[1])
learner = Learner(RunConfig.model_validate(task["config"]), rank=task["rank"], rendezvous=task["rendezvous"], run_dir=task["run_dir"])
if task["restore"]:
    learner.restore(task["restore"])
reports = []
while learner.version < task["until"]:
    # The last step has a single trajectory: one of two ranks gets none, and still takes part.
    last = learner.version == 4
    groups = [
        make_group(i, rewards=(1.0,) if last else (1.0, 0.0, 0.5), seed=learner.version, version=learner.version)
        for i in range(1 if last else 3)
    ]
    reports.append(learner.update(*groups).metrics)
published = list(learner.publish())
if task["save"]:
    learner.save(task["save"], {"policy_version": learner.version})
learner.export(task["export"])
if task["rank"] == 0:
    print("RESULT" + json.dumps({"reports": reports, "canary": published[-1]["canary"]["logprobs"]}))
print("the script is done, the interpreter ends", file=sys.stderr, flush=True)
"""


def _run(
    folder: Path,
    model: Path,
    *,
    num_ranks: int,
    until: int = NUM_STEPS,
    restore: str = "",
    save: str = "",
    **learner: Any,
) -> Any:
    dtype = learner.pop("dtype", "float32")
    config = {
        "model": {"path": str(model), "dtype": dtype},
        "prompts": "file",
        "num_steps": NUM_STEPS,
        "algorithm": learner.pop("algorithm", {}),
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.1},
        "learner": {"num_ranks": num_ranks, "num_threads": 1, "max_tokens_per_micro_batch": 40, "timeout_s": 60}
        | learner,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    tasks = [
        {"config": config, "rank": rank, "rendezvous": rendezvous, "run_dir": str(folder), "until": until,
         "restore": restore, "save": save, "export": str(folder / "export")}
        for rank in range(num_ranks)
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            # An abort in native code then says where it came from.
            [sys.executable, "-X", "faulthandler", "-c", SCRIPT, json.dumps(t)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for t in tasks
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:] + outputs[-1][1][-3000:]
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT")) | {"weights": load_file(folder / "export" / "model.safetensors")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "activation_checkpointing": True},
        {"algorithm": {"advantage": "gae", "value": {"learning_rate": 1e-3}, "proximal": "recompute"}},
        {"lora": {"rank": 4}, "algorithm": {"kl": {"coefficient": 0.1}}},
    ],
    ids=["float32", "bfloat16-checkpointed", "critic", "lora"],
)
def test_two_ranks_compute_what_one_computes(tmp_path: Path, options: dict[str, Any]):
    model = make_tiny_model(tmp_path / "model")
    one = _run(tmp_path / "one", model, num_ranks=1, **options)
    two = _run(tmp_path / "two", model, num_ranks=2, **options)
    is_half = options.get("dtype") == "bfloat16"
    tolerance = {"rtol": 0.05, "atol": 0.05} if is_half else {"rtol": 2e-4, "atol": 2e-5}
    for alone, together in zip(one["reports"], two["reports"], strict=True):
        for name in ("learner/loss", "learner/gradient_norm", "learner/ratio_mean", "learner/tokens"):
            assert_close(together[name], alone[name], **tolerance)
    for name, tensor in one["weights"].items():
        assert_close(two["weights"][name], tensor, rtol=0.05 if is_half else 1e-3, atol=0.02 if is_half else 5e-5)
    assert_close(two["canary"], one["canary"], rtol=0.05, atol=0.2 if is_half else 1e-3)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_back(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    whole = _run(tmp_path / "whole", model, num_ranks=2)
    saved = str(tmp_path / "checkpoints" / "step-000003")
    _run(tmp_path / "first", model, num_ranks=2, until=3, save=saved)
    for num_ranks in (1, 2):
        resumed = _run(tmp_path / f"resumed-{num_ranks}", model, num_ranks=num_ranks, restore=saved)
        for name, tensor in whole["weights"].items():
            # On as many ranks bit for bit; on others sums are taken in another order.
            exact = num_ranks == 2
            assert_close(resumed["weights"][name], tensor, rtol=0 if exact else 1e-3, atol=0 if exact else 5e-5)

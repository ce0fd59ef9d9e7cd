"""What ranks learned in a few steps, by options that reach every part of the learner, and whether two of them learned alike."""

import copy
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from tests.integration.ranks import Ranks
from tests.models import make_tiny_reward_model

NUM_STEPS, LEARNING_RATE = 5, 1e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16-checkpointed": {"dtype": "bfloat16", "activation_checkpointing": True},
    "compiled-checkpointed": {"compile": True, "activation_checkpointing": True},
    "critic": {
        "algorithm": {
            "advantage": "gae",
            "value": {"learning_rate": 1e-3, "warmup_steps": 2, "normalise_returns": True},
            "proximal": "recompute",
        }
    },
    "ewma": {
        "mini_batches": 2,
        "split_by": "trajectories",
        "algorithm": {"proximal": "ewma", "proximal_decay": 0.5, "corrections": ["decoupled"]},
    },
    "lora": {"lora": {"rank": 4}, "algorithm": {"kl": {"loss": {"coefficient": 0.1}}}},
    "distillation": {"algorithm": {"distillation": {"top_k": 2}}},
    # The last step has one trajectory, so one update an epoch.
    "several-updates": {
        "epochs": 2,
        "mini_batches": 3,
        "split_by": "trajectories",
        "algorithm": {"advantage": "gae", "value": {"loss": {"name": "value_clip"}}, "proximal": "recompute"},
    },
    # Of the last step the only trajectory is dropped: no update, and no rank waits for the other.
    "dropped": {
        "algorithm": {"proximal": "recompute", "corrections": [{"name": "sequence_mask", "low": 0.43, "high": 10.0}]}
    },
    # A critic takes part in the passes over demonstrations; of the single one, one of two ranks gets none.
    "sft": {"algorithm": {"advantage": "gae", "value": {"learning_rate": 1e-3}, "sft": {"batch_size": 1}}},
}


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """With the files that they name, in `folder`."""
    options = copy.deepcopy(OPTIONS[name])
    algorithm = options.get("algorithm", {})
    if "value" in algorithm:
        algorithm["value"]["path"] = str(make_tiny_reward_model(folder / "critic", hidden_size=32))
    if sft := algorithm.get("sft"):
        (folder / "rows.jsonl").write_text(
            '{"prompt": "2+2", "completion": "4"}\n{"prompt": "a", "completion": "bcd"}\n'
        )
        sft["prompts"] = {"name": "file", "path": str(folder / "rows.jsonl")}
    return options


def learned(
    ranks: Ranks,
    folder: Path,
    model: Path,
    *,
    num_ranks: int,
    until: int = NUM_STEPS,
    restore: str = "",
    save: str = "",
    beside: int = 0,
    without_room: int | None = None,
    full_disk: int | None = None,
    shards_alone: bool = False,
    traces_alone: bool = False,
    rests: bool = False,
    environment: dict[str, str] | None = None,
    **learner: Any,
) -> Any:
    """What rank 0 found, the weights that were exported, and every rank's error. With `shards_alone` a single rank's model is sharded;
    with `traces_alone` what is to be compiled is traced, and no kernel made of it; with `rests` the ranks rest after each step, on CPUs
    too."""
    dtype, algorithm = learner.pop("dtype", "float32"), learner.pop("algorithm", {})
    asynchronous = learner.pop("asynchronous", True)
    of_run = {name: learner.pop(name) for name in ("deterministic", "sampling") if name in learner}
    config = of_run | {
        "model": {"path": str(model), "dtype": dtype},
        "prompts": "file",
        "num_steps": NUM_STEPS,
        "algorithm": algorithm,
        "checkpoint": {"asynchronous": asynchronous},
        "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": 0.5, "weight_decay": 0.1},
        "learner": {"num_ranks": num_ranks, "num_threads": 1, "max_tokens_per_micro_batch": 40, "timeout_s": 600}
        | learner,
    }
    found = ranks.do(
        "learn",
        config=config,
        run_dir=str(folder),
        until=until,
        restore=restore,
        save=save,
        beside=beside,
        without_room=without_room,
        full_disk=full_disk,
        shards_alone=shards_alone,
        traces_alone=traces_alone,
        rests=rests,
        environment=environment or {},
        export=str(folder / "export"),
    )
    return found[0] | {
        "weights": load_file(folder / "export" / "model.safetensors"),
        "errors": [rank["error"] for rank in found],
        "at_rest": [rank["at_rest"] for rank in found],
        "are_beside": [rank["is_beside"] for rank in found],
        "restored": [rank["restored"] for rank in found],
        "reads": [rank["read"] for rank in found],
        "recorded": [_in_order(chain(*parts)) for parts in zip(*(rank["recorded"] for rank in found), strict=True)],
    }


def assert_learned_alike(found: Any, expected: Any, *, is_half: bool) -> None:
    """In all steps, up to rounding: losses, gradients, what was recorded of each token, weights, and the log-probs of the canary."""
    tolerance = {"rtol": 0.05, "atol": 0.05} if is_half else {"rtol": 2e-4, "atol": 2e-5}
    for one, two in zip(expected["reports"], found["reports"], strict=True):
        norms = {name for name in one if name.endswith("gradient_norm") and name.startswith("learner/")}
        assert norms
        for name in ("learner/loss", "learner/ratio_mean", "learner/tokens", "learner/empty_updates", *norms):
            assert_close(two[name], one[name], **tolerance)
    # In bfloat16 a ratio beside a bound may be on either side of it.
    left_out = {"clipped"} if is_half else set[str]()
    _assert_recorded_alike(expected["recorded"], found["recorded"], left_out=left_out, **tolerance)
    _assert_weights_alike(found["weights"], expected["weights"], is_half=is_half)
    assert_close(found["canary"], expected["canary"], rtol=0.05, atol=0.2 if is_half else 1e-3)


def _assert_weights_alike(found: dict[str, Tensor], expected: dict[str, Tensor], *, is_half: bool) -> None:
    """All but one in ten thousand: Adam divides a gradient by its own size, also one that is nothing but rounding."""
    close = {"rtol": 0.05, "atol": 0.02} if is_half else {"rtol": 1e-3, "atol": 5e-5}
    num_apart = sum(int((~torch.isclose(found[name], each, **close)).sum()) for name, each in expected.items())
    assert num_apart <= sum(each.numel() for each in expected.values()) * 1e-4
    for name, each in expected.items():
        assert_close(found[name], each, rtol=close["rtol"], atol=max(close["atol"], LEARNING_RATE))


def _assert_recorded_alike(
    alone: list[list[dict[str, Any]]], together: list[list[dict[str, Any]]], *, left_out: set[str], **tolerance: float
):
    """Each rank recorded the trajectories that it learned, and both together those that one records."""
    assert [len(rows) for rows in alone] == [9, 9, 9, 9, 1]
    for one, two in zip(chain(*alone), chain(*together), strict=True):
        for name in one.keys() - left_out:
            value = one[name]
            if isinstance(value, list):
                assert_close(
                    torch.tensor(two[name], dtype=torch.float64), torch.tensor(value, dtype=torch.float64), **tolerance
                )
            else:
                assert two[name] == value, name


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["ticket_index"], row["sample_index"]))

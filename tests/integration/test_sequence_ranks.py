"""Ranks that share each pass, a slice of its positions each, compute what one rank computes alone: real ranks, over gloo."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.integration.ranks import Ranks
from tests.models import make_tiny_model

LENGTHS = (31, 9, 18)
"""Of a group's completions, after a prompt of 5: the first is longer than the window of Gemma's layer, 24."""
TOKENS_PER_PASS = 128
TOKEN_LEVEL = {"policy_loss": "ppo_clip", "entropy_coefficient": 0.01, "monitor": {"entropy": 1}}
SEQUENCE_LEVEL = {"policy_loss": "gspo", "proximal": "recompute", "aggregation": "sequence_mean"}
CRITIC = {"advantage": "gae", "value": {"learning_rate": 1e-3}, "proximal": "recompute"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as four:
        yield four


def taken(ranks: Ranks, folder: Path, model: Path, *, num_ranks: int, shared_by: int, layout: str, **more: Any) -> Any:
    """What the ranks found, with the whole gradients of the step's last update."""
    folder.mkdir()
    learner = more.pop("learner", {})
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": "file",
        "num_steps": 1,
        "learner": {
            "num_ranks": num_ranks,
            "sequence_parallel_size": shared_by,
            "num_threads": 1,
            "max_tokens_per_micro_batch": TOKENS_PER_PASS // shared_by,
            "timeout_s": 240,
        }
        | learner,
    } | more
    found = ranks.do(
        "take gradients",
        config=config,
        layout=layout,
        lengths=LENGTHS,
        routed=more.get("rollout", {}).get("routing_replay", False),
        save=str(folder / "gradients.safetensors"),
    )
    recorded = chain(*(rank["recorded"] for rank in found))
    return {
        "gradients": load_file(folder / "gradients.safetensors"),
        "metrics": found[0]["metrics"],
        "recorded": sorted(recorded, key=lambda row: (row["ticket_index"], row["sample_index"])),
        "lengths": [rank["lengths"] for rank in found],
    }


@pytest.mark.parametrize(
    ("architecture", "layout", "num_ranks", "shared_by", "more"),
    [
        ("qwen3", "shared", 2, 2, {"algorithm": TOKEN_LEVEL}),
        # The second update's ratios are to what the first look saw.
        ("llama", "packed", 2, 2, {"algorithm": SEQUENCE_LEVEL, "learner": {"epochs": 2}}),
        # Two key-value heads, which four ranks repeat.
        ("qwen3", "shared", 4, 4, {"algorithm": SEQUENCE_LEVEL}),
        # Two groups, with passes of their own.
        ("llama", "shared", 4, 2, {"algorithm": TOKEN_LEVEL, "learner": {"activation_checkpointing": True}}),
        ("gemma3", "packed", 2, 2, {"algorithm": TOKEN_LEVEL}),
        ("gemma3", "shared", 4, 4, {"algorithm": SEQUENCE_LEVEL}),
        ("qwen3", "packed", 2, 2, {"algorithm": CRITIC}),
        ("qwen3", "shared", 2, 2, {"algorithm": CRITIC | {"value": {"backbone": "shared", "learning_rate": 1e-3}}}),
        ("qwen3", "shared", 2, 2, {"algorithm": TOKEN_LEVEL, "sampling": {"top_k": 20, "min_p": 0.01}}),
        (
            "qwen3_moe",
            "shared",
            2,
            2,
            {
                "algorithm": TOKEN_LEVEL | {"router_aux_loss_coefficient": 0.5},
                "rollout": {"routing_replay": True},
            },
        ),
    ],
    ids=[
        "token-level",
        "sequence-level",
        "repeated-key-value-heads",
        "two-groups-checkpointed",
        "window",
        "window-of-four",
        "critic",
        "shared-critic",
        "truncated",
        "routing",
    ],
)
def test_ranks_that_share_passes_take_the_gradients_of_one(
    ranks: Ranks, tmp_path: Path, architecture: Any, layout: str, num_ranks: int, shared_by: int, more: dict[str, Any]
):
    model = make_tiny_model(tmp_path / "model", architecture=architecture)
    one = taken(ranks, tmp_path / "one", model, num_ranks=1, shared_by=1, layout=layout, **more)
    shared = taken(ranks, tmp_path / "shared", model, num_ranks=num_ranks, shared_by=shared_by, layout=layout, **more)
    assert one["gradients"].keys() == shared["gradients"].keys() and len(one["gradients"]) >= 20
    for name, gradient in one["gradients"].items():
        scale = float(gradient.abs().max())
        assert_close(
            shared["gradients"][name], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    # Each trajectory once, by whichever rank.
    assert [row["ticket_index"] for row in shared["recorded"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for alone, together in zip(one["recorded"], shared["recorded"], strict=True):
        for name in ("policy_logprobs", "entropies"):
            if alone[name] is not None:
                assert_close(torch.tensor(together[name]), torch.tensor(alone[name]), rtol=1e-5, atol=1e-5)
    names = {name for name in one["metrics"] if name.startswith("learner/")} - {"learner/micro_batches"}
    for name in names:
        assert shared["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-6), name
    if num_ranks == shared_by:
        assert shared["metrics"]["learner/micro_batches"] == one["metrics"]["learner/micro_batches"] > 1
        # No rank sees more than its slice of a pass.
        assert shared["lengths"] == [[-(-length // shared_by) for length in one["lengths"][0]]] * num_ranks

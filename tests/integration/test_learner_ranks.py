"""Two learner ranks (FSDP2 over gloo, a process each) compute what one computes, and restore each other's checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.integration.ranks import Ranks
from tests.models import make_tiny_model, make_tiny_reward_model, make_tokenizer

NUM_STEPS = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks(2)
    try:
        yield pair
        pair.close()
    finally:
        pair.kill()


def learned(
    ranks: Ranks,
    folder: Path,
    model: Path,
    *,
    num_ranks: int,
    until: int = NUM_STEPS,
    restore: str = "",
    save: str = "",
    **learner: Any,
) -> Any:
    """What rank 0 found, the weights that were exported, and every rank's error."""
    dtype, algorithm = learner.pop("dtype", "float32"), learner.pop("algorithm", {})
    config = {
        "model": {"path": str(model), "dtype": dtype},
        "prompts": "file",
        "num_steps": NUM_STEPS,
        "algorithm": algorithm,
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.1},
        "learner": {"num_ranks": num_ranks, "num_threads": 1, "max_tokens_per_micro_batch": 40, "timeout_s": 60}
        | learner,
    }
    found = ranks.do(
        "learn",
        config=config,
        run_dir=str(folder),
        until=until,
        restore=restore,
        save=save,
        export=str(folder / "export"),
    )
    return found[0] | {
        "weights": load_file(folder / "export" / "model.safetensors"),
        "errors": [rank["error"] for rank in found],
    }


def test_a_rank_that_loads_never_holds_the_whole_model(ranks: Ranks, tmp_path: Path):
    layers = Qwen3Config(
        vocab_size=128, hidden_size=512, intermediate_size=2048, num_hidden_layers=25, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(layers).to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = {
        "model": {"path": str(tmp_path), "dtype": "float32"},
        "prompts": "file",
        "num_steps": 1,
        "learner": {"num_ranks": 2, "num_threads": 1, "timeout_s": 60, "max_tokens_per_micro_batch": 40},
    }
    for rank in ranks.do("load", config=config):
        assert rank["loading"] == "streamed"
        # Its float32 shards, and what a first pass gathers and needs: some layers of 16 MB, libraries' buffers.
        assert rank["whole_bytes"] > 390e6 and rank["grown_bytes"] < rank["whole_bytes"] / 2 + 120e6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "activation_checkpointing": True},
        {
            "algorithm": {
                "advantage": "gae",
                "value": {"learning_rate": 1e-3, "warmup_steps": 2, "normalise_returns": True},
                "proximal": "recompute",
            }
        },
        {
            "mini_batches": 2,
            "split_by": "trajectories",
            "algorithm": {"proximal": "ewma", "proximal_decay": 0.5, "corrections": ["decoupled"]},
        },
        {"lora": {"rank": 4}, "algorithm": {"kl": {"loss": {"coefficient": 0.1}}}},
        {"algorithm": {"distillation": {"top_k": 2}}},
        # The last step has one trajectory, so one update an epoch.
        {
            "epochs": 2,
            "mini_batches": 3,
            "split_by": "trajectories",
            "algorithm": {"advantage": "gae", "value": {"loss": {"name": "value_clip"}}, "proximal": "recompute"},
        },
        # Of the last step the only trajectory is dropped: no update, and no rank waits for the other.
        {"algorithm": {"proximal": "recompute", "corrections": [{"name": "sequence_mask", "low": 0.43, "high": 10.0}]}},
        # A critic takes part in the passes over demonstrations; of the single one, one of two ranks gets none.
        {"algorithm": {"advantage": "gae", "value": {"learning_rate": 1e-3}, "sft": {"batch_size": 1}}},
    ],
    ids=[
        "float32",
        "bfloat16-checkpointed",
        "critic",
        "ewma",
        "lora",
        "distillation",
        "several-updates",
        "dropped",
        "sft",
    ],
)
def test_two_ranks_compute_what_one_computes(ranks: Ranks, tmp_path: Path, options: dict[str, Any]):
    model = make_tiny_model(tmp_path / "model")
    if "value" in options.get("algorithm", {}):
        options["algorithm"]["value"]["path"] = str(make_tiny_reward_model(tmp_path / "critic", hidden_size=32))
    if sft := options.get("algorithm", {}).get("sft"):
        (tmp_path / "rows.jsonl").write_text(
            '{"prompt": "2+2", "completion": "4"}\n{"prompt": "a", "completion": "bcd"}\n'
        )
        sft["prompts"] = {"name": "file", "path": str(tmp_path / "rows.jsonl")}
    one = learned(ranks, tmp_path / "one", model, num_ranks=1, **options)
    two = learned(ranks, tmp_path / "two", model, num_ranks=2, **options)
    is_half = options.get("dtype") == "bfloat16"
    tolerance = {"rtol": 0.05, "atol": 0.05} if is_half else {"rtol": 2e-4, "atol": 2e-5}
    for alone, together in zip(one["reports"], two["reports"], strict=True):
        norms = {name for name in alone if name.endswith("gradient_norm") and name.startswith("learner/")}
        assert ("learner/critic_gradient_norm" in norms) == ("value" in options.get("algorithm", {}))
        for name in ("learner/loss", "learner/ratio_mean", "learner/tokens", "learner/empty_updates", *norms):
            assert_close(together[name], alone[name], **tolerance)
    for name, tensor in one["weights"].items():
        assert_close(two["weights"][name], tensor, rtol=0.05 if is_half else 1e-3, atol=0.02 if is_half else 5e-5)
    assert_close(two["canary"], one["canary"], rtol=0.05, atol=0.2 if is_half else 1e-3)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_back(ranks: Ranks, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    # An average of the weights is restored too.
    ewma = {"proximal": "ewma", "corrections": ["decoupled"]}
    whole = learned(ranks, tmp_path / "whole", model, num_ranks=2, algorithm=ewma)
    saved = str(tmp_path / "checkpoints" / "step-000003")
    learned(ranks, tmp_path / "first", model, num_ranks=2, until=3, save=saved, algorithm=ewma)
    for num_ranks in (1, 2):
        resumed = learned(
            ranks, tmp_path / f"resumed-{num_ranks}", model, num_ranks=num_ranks, restore=saved, algorithm=ewma
        )
        for name, tensor in whole["weights"].items():
            # On as many ranks bit for bit; on others sums are taken in another order.
            exact = num_ranks == 2
            assert_close(resumed["weights"][name], tensor, rtol=0 if exact else 1e-3, atol=0 if exact else 5e-5)


def test_a_save_that_cannot_begin_fails_on_every_rank_and_none_waits_for_another(ranks: Ranks, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "file").write_text("where a folder should be")
    saved = str(tmp_path / "file" / "step-000001")
    found = learned(ranks, tmp_path / "run", model, num_ranks=2, until=1, save=saved)
    assert len(found["errors"]) == 2
    assert all("step-000001 was not saved" in error for error in found["errors"])

"""Writes a LoRA adapter as a peft folder, for engines and for users."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.weights.manifest import Adapter

PREFIX = "base_model.model."
"""peft's prefix of a module's name in the base model."""


def write_adapter(
    folder: Path,
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    adapter: Adapter,
    base_model: str,
    revision: str | None = None,
) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`. `named` has peft's names (`base_model.model.….lora_A.weight`).
    `revision`: of the base model on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in named}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

"""The small Llama that some golden cases were computed with."""

import copy
import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def load_model(root: Path) -> torch.nn.Module:
    """A new one, from `_models/tiny_llama_v32` beside the peers' folders, in float32."""
    return copy.deepcopy(_loaded(root))


@functools.cache
def _loaded(root: Path) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = root / "_models" / "tiny_llama_v32"
    described = json.loads((folder / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**described["config"], attn_implementation=described["attn_implementation"]))
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if missing or unexpected:
        raise ValueError(f"the weights do not fit the model: {missing} missing, {unexpected} unexpected")
    return model.eval()

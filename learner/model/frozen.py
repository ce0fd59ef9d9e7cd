"""Parameters that a model's own code freezes, such as the bias that spreads a router's load, become buffers.

A buffer has the type and the values that it was loaded with, on any number of ranks, and leaves the learner so. A parameter is rounded to
the type of the passes, and once more when it is published: engines keep such a bias in float32, and would choose other experts.
"""

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig


def built_empty(kind: Any, config: PretrainedConfig, **options: Any) -> Any:
    """A model of the auto class `kind` in float32, without memory for its parameters. Buffers are real: many, such as rotary frequencies,
    are in no file."""
    with init_empty_weights(include_buffers=False):
        return kind.from_config(copy.deepcopy(config), dtype=torch.float32, **options)


def frozen(module: nn.Module) -> list[str]:
    """Names of the parameters that do not train. To be asked of a model that was built: transformers thaws what it loads from files."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def make_buffers(module: nn.Module, names: list[str]) -> None:
    """Of these parameters, in place. Those without memory are 0."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        part, parameter = module.get_submodule(owner), module.get_parameter(name)
        value = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter.detach()
        delattr(part, leaf)
        part.register_buffer(leaf, value)

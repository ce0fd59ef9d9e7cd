"""Parameters that a model's own code freezes, such as a router's load-balancing bias, become buffers.

A buffer keeps the type and values that it was loaded with, on any number of ranks and when it is published. A parameter would be rounded to
the type of the passes, and again when it is published: engines keep such a bias in float32, and would choose other experts.
"""

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def built_empty(kind: Any, config: PretrainedConfig, **options: Any) -> Any:
    """A model of the auto class `kind` in float32, without memory for its parameters. Buffers have values, since many are in no file."""
    with init_empty_weights(include_buffers=False):
        return kind.from_config(copy.deepcopy(config), dtype=torch.float32, **options)


def frozen(module: nn.Module) -> list[str]:
    """Names of the parameters that do not train. Ask before weights are loaded: transformers makes all loaded parameters trainable."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def keep_float32(model: PreTrainedModel, names: list[str]) -> None:
    """Makes transformers load these parameters of the model's class in float32, whatever the type of the others. Only some classes
    say so themselves (Ernie 4.5, not AFMoE)."""
    type(model)._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


def make_buffers(module: nn.Module, names: list[str]) -> None:
    """Turns these parameters into buffers, in place. Those without memory become 0."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        part, parameter = module.get_submodule(owner), module.get_parameter(name)
        value = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter.detach()
        delattr(part, leaf)
        part.register_buffer(leaf, value)

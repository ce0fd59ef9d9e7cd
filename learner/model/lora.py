"""LoRA adapters in a causal model, through peft: added, switched off (for the reference), merged for publishing."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.contracts.errors import ConfigError, headline
from cluster.contracts.learner_config import LoraConfig
from cluster.weights.adapter import PREFIX
from cluster.weights.manifest import Adapter
from learner.distributed import whole

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"


def add_adapters(causal_lm: PreTrainedModel, *, lora: LoraConfig, seed: int) -> None:
    """Adds the adapters of `drawn_adapters`, in place; only they train. Raises ConfigError for dropout and for unsupported targets."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    if lora.dropout:
        raise ConfigError(
            f"learner.lora.dropout={lora.dropout}: the policy that learns would not be the one that sampled; use 0.0"
        )
    targets = {f"{name}.lora_A.weight": torch.empty(0) for name in _targets(causal_lm, lora=lora)}
    # peft reads target names in its configuration as those of transformers 4, where a mixture's experts and routers were linear layers.
    # Names in a state dict are used unchanged, with a warning about the difference.
    config = PeftConfig(r=lora.rank, lora_alpha=cast(int, lora.alpha), target_modules=[])
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            inject_adapter_in_model(config, causal_lm, state_dict=targets)
    except ValueError as error:
        raise ConfigError(f"learner.lora.target_modules={lora.target_modules!r}: {headline(error)}") from error
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for name, value in drawn_adapters(causal_lm, seed=seed).items():
        causal_lm.get_parameter(name).data.copy_(value)


def linear_layers(causal_lm: nn.Module) -> list[str]:
    """Names of the layers that can have adapters. Subclasses of nn.Linear may compute something else: in some mixtures, routers do."""
    return [name for name, part in causal_lm.named_modules() if type(part) is nn.Linear]


def _targets(causal_lm: PreTrainedModel, *, lora: LoraConfig) -> list[str]:
    """Full names of the layers that get adapters. Raises ConfigError for layers that cannot have one."""
    head = causal_lm.get_output_embeddings()
    if lora.target_modules == "all-linear":
        # Some mixtures have plain linear layers in their routers.
        names = [name for name in linear_layers(causal_lm) if "router" not in name.split(".")]
        linear = {name: causal_lm.get_submodule(name) for name in names}
        # A layer with one output (the gate of a shared expert) is smaller than an adapter for it, and vLLM would ignore the adapter.
        found = [name for name, part in linear.items() if part is not head and part.out_features != 1]
        if not found:
            raise ConfigError(f"learner.lora: a {type(causal_lm).__name__} has no linear layers; leave it out")
        return found
    ends = tuple(f".{each}" for each in lora.target_modules)
    found = {name: part for name, part in causal_lm.named_modules() if f".{name}".endswith(ends)}
    if not found:
        raise ConfigError(
            f"learner.lora.target_modules={list(lora.target_modules)!r}: no layer of the model is named so"
        )
    for name, part in found.items():
        if part is head:
            raise ConfigError(
                "learner.lora.target_modules names the vocabulary head, whose log-probs are computed from its weight alone; leave it out"
            )
        if type(part) is not nn.Linear:
            raise ConfigError(
                f"learner.lora.target_modules names {name}, a {type(part).__name__}; only linear layers can be merged"
            )
    return list(found)


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return ".lora_" in name


def drawn_adapters(causal_lm: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """Initial adapters by parameter name, the same for any number of ranks: A is uniform as a linear layer's weight, B is zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Tensor] = {}
    for name, parameter in causal_lm.named_parameters():
        if is_adapter(name):
            bound = 0.0 if ".lora_B." in name else parameter.shape[1] ** -0.5
            drawn[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
    return drawn


@contextlib.contextmanager
def without_adapters(causal_lm: nn.Module) -> Iterator[None]:
    """Inside the context the model computes as the base model, from which the run started."""
    layers = _layers(causal_lm)
    for layer in layers.values():
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers.values():
            layer._disable_adapters = False


def adapter_of(causal_lm: nn.Module, *, lora: LoraConfig) -> Adapter:
    """The adapter's description, which an engine needs to load its tensors."""
    targets = {name.rpartition(".")[2] for name in _layers(causal_lm)}
    return Adapter(rank=lora.rank, alpha=lora.alpha, target_modules=tuple(sorted(targets)))


def adapters(causal_lm: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, whole tensor in `dtype`) of every adapter matrix, gathered one by one; all ranks must iterate."""
    for name, parameter in causal_lm.named_parameters():
        if is_adapter(name):
            yield PREFIX + name.replace(f".{_ADAPTER}.", "."), whole(parameter.detach()).to(dtype)


def merged(causal_lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, whole tensor) of every parameter, with adapters merged in; all ranks must call it."""
    layers = _layers(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        if is_adapter(name):
            continue
        owner = name.rpartition(".base_layer.")[0]
        if owner not in layers:
            yield name, whole(parameter.detach())
            continue
        layer, plain = layers[owner], name.replace(".base_layer.", ".")
        base = whole(parameter.detach())
        if not name.endswith(".weight"):
            yield plain, base
            continue
        down, up = (
            whole(part.get_parameter(f"{_ADAPTER}.weight").detach()).float() for part in (layer.lora_A, layer.lora_B)
        )
        yield plain, torch.addmm(base.float(), up, down, alpha=layer.scaling[_ADAPTER])


def _layers(causal_lm: nn.Module) -> dict[str, "LoraLayer"]:
    """Layers that have adapters, by name. peft, which is slow to import, is imported only for a model that has some."""
    if not any(is_adapter(name) for name, _ in causal_lm.named_parameters()):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in causal_lm.named_modules() if isinstance(part, LoraLayer)}

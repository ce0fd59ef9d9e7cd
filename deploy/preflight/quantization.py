"""Checks of `rollout.quantization`: vLLM has a kernel for the scheme on the engines' hardware, and it supports the model's layers."""

import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight.compute_type import asked_of_gpus
from learner.processor import cpu_facts
from learner.shape import has_experts, head_size, inner_size, num_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ON_CPUS = ("int8_per_channel", "fp8_per_channel")
"""Schemes of vLLM's build for CPUs. It cannot quantize FP8 by tensor, and multiplies FP8 by block only with AMX."""
_VNNI = {"avx512_vnni", "avx_vnni"}
"""Processor flags: either means that sums of 8-bit products do not overflow."""
_BLOCK = 128
"""Rows and columns of a block of FP8."""


def check_quantization(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError for a scheme that cannot work. On a running cluster the GPUs are checked when its engines start."""
    scheme, rollout = config.rollout.quantization, config.rollout
    if scheme is None:
        return
    named, on_gpus = f"rollout.quantization={scheme!r}", rollout.gpus_per_worker > 0
    if not on_gpus and scheme not in _ON_CPUS:
        raise ConfigError(
            f"{named} has no kernel in vLLM's build for CPUs; use {' or '.join(_ON_CPUS)}, or set rollout.gpus_per_worker"
        )
    if config.model.dtype != "bfloat16":
        raise ConfigError(
            f"{named} with model.dtype={config.model.dtype!r}: vLLM's kernels for it need bfloat16; use model.dtype=bfloat16"
        )
    if config.published_adapter is not None:
        raise ConfigError(
            f"{named} with learner.lora.publish='adapter': adapters beside 8-bit layers are untested; use learner.lora.publish=merged, "
            "which quantizes the sum"
        )
    if on_gpus and is_local and scheme.startswith("fp8"):
        _check_gpus(named)


def check_layers(text: "PretrainedConfig", config: RunConfig) -> None:
    """Raises ConfigError for a model that the scheme cannot quantize. `text` is the language model's configuration."""
    scheme, parallel = config.rollout.quantization, config.rollout.tensor_parallel_size
    if scheme is None:
        return
    if has_experts(text):
        raise ConfigError(
            f"rollout.quantization={scheme!r} of a mixture of experts: its routers would be rounded too, and the engine would choose "
            "other experts than the learner; leave it out"
        )
    if scheme != "fp8_per_block":
        return
    # Inputs are rounded in groups as wide as a block. Only the last block of rows may be smaller.
    sizes = {
        "hidden_size": text.hidden_size,
        "intermediate_size": inner_size(text) // parallel,
        "heads' size": num_heads(text) * head_size(text) // parallel,
    }
    for name, size in sizes.items():
        if size % _BLOCK:
            raise ConfigError(
                f"rollout.quantization='fp8_per_block' needs inputs in whole blocks of {_BLOCK}, and the model's {name} is {size}"
                f"{' in each process' if parallel > 1 else ''}; use rollout.quantization=fp8_per_channel"
            )


def overflow_rows(config: RunConfig, *, is_local: bool) -> Iterator[tuple[str, str, str]]:
    """A note if the engines run on this machine's processor and its 8-bit products overflow. Processors other than x86 have no flags: no
    note."""
    on_this_cpu = is_local and config.rollout.gpus_per_worker == 0
    flags, _ = cpu_facts()
    if config.rollout.quantization == "int8_per_channel" and on_this_cpu and flags and _VNNI.isdisjoint(flags):
        note = (
            "rollout.quantization=int8_per_channel: this processor has no VNNI, so sums of 8-bit products overflow: the error of samples "
            "is several times that of rounding; use fp8_per_channel, or leave it out"
        )
        yield "rollout", "note", note


def _check_gpus(named: str) -> None:
    try:
        is_able = asked_of_gpus("do_gpus_multiply_fp8")
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{named}: the GPUs cannot be asked whether they multiply FP8 ({error}); look at nvidia-smi, or leave it out"
        ) from error
    if not is_able:
        raise ConfigError(
            f"{named} needs GPUs of compute capability 8.9 or more (Ada, Hopper); use rollout.quantization=int8_per_channel, or leave "
            "it out"
        )

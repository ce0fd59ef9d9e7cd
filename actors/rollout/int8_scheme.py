"""INT8 for vLLM's linear layers, quantized from ordinary weights at each load. vLLM has such schemes for FP8; for INT8 it only reads
checkpoints that are already quantized.

Each output channel of a matrix has one scale; each token's input has one, measured on the fly. Weights and inputs are rounded to 8 bits
around zero, and vLLM's own kernels multiply them as integers (oneDNN on CPUs, CUTLASS or Triton on GPUs). Embeddings, the vocabulary head,
norms and routers keep the compute type. Importing this module registers the scheme with vLLM in this process.
"""

from typing import Any

import torch
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter

NAME = "int8_per_channel"
_LARGEST = 127
"""vLLM's kernels round inputs to the same range: -128 has no opposite."""


def quantize(weights_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scales [N, 1]) with integers · scales ≈ weights. A channel of zeros has scale 1."""
    wide_NK = weights_NK.float()
    largest_N1 = wide_NK.abs().amax(dim=-1, keepdim=True)
    scales_N1 = torch.where(largest_N1 > 0, largest_N1 / _LARGEST, 1.0)
    return (wide_NK / scales_N1).round().to(torch.int8), scales_N1


class Int8LinearMethod(OnlineLinearBase):
    """One linear layer."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        # Parameters that the kernel reads; None in a symmetric scheme that measures its inputs.
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            layer.register_parameter(name, None)
        self._kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=NAME
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        # vLLM calls this when the layer is loaded, and again when the whole model is.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        integers, scales = quantize(layer.weight)
        replace_parameter(layer, "weight", integers)
        replace_parameter(layer, "weight_scale", scales)
        # oneDNN keeps the address of the scales. A reload copies them elsewhere and would free these: log-probs would be NaN.
        self._scales = scales
        self._kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernel.apply_weights(layer, x, bias)


@register_quantization_config(NAME)
class Int8Config(QuantizationConfig):
    """Quantizes all linear layers; the vocabulary head is not among vLLM's."""

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8Config":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None

"""Weights that arrive as host tensors go into a vLLM that serves, by vLLM's public WeightTransferEngine interface.

vLLM makes one receiver in each of the engine's processes, by the backend's name. vLLM packs matrices for its kernels and frees the
originals, so weights cannot be assigned: they go through its layerwise reload, between start and finish.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "treadwheel_host_tensors"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Host tensors need no rendezvous."""


@dataclass
class HostTensors(WeightTransferUpdateInfo):
    """One chunk of an update."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    """Checkpoint names and CPU tensors; they must stay alive until the update is finished."""
    repair_tied_head: bool = True
    """False leaves vLLM's stale vocabulary head of tied models as it is on CPU, to show that the canary catches it."""


class HostTensorReceiver(WeightTransferEngine[NoInitInfo, HostTensors]):
    """Loads checkpoint-format host tensors into the model that serves, in place."""

    init_info_cls = NoInitInfo
    update_info_cls = HostTensors

    _repair_tied_head = True

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        if current_platform.is_cpu():
            self._forget_kernels_of_experts()

    # The inherited method synchronizes an accelerator, which a CPU engine has not.
    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostTensors) -> None:
        self._repair_tied_head = update_info.repair_tied_head
        model: Any = self.model
        model.load_weights(iter(update_info.tensors))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self._repair_tied_head:
            self._pack_tied_heads()

    def shutdown(self) -> None:
        pass

    def _forget_kernels_of_experts(self) -> None:
        # vLLM packs experts for CPUs where it makes their kernel, once: later weights would be read as packed, and are not.
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _pack_tied_heads(self) -> None:
        # A tied head shares the embedding's storage, so the reload finds no weights of its own for it and keeps the old packed copy.
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)


class ReceiverRegistration:
    """vLLM mixes this into its worker class (`worker_extension_cls`): importing it registers the receiver in that process."""


def register() -> None:
    """Makes the receiver known to vLLM in this process; calling it again is fine."""
    # The factory refuses a second registration and has no query.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostTensorReceiver)


register()

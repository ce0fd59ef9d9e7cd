"""Loads arriving weights into a running vLLM engine, by vLLM's public WeightTransferEngine interface.

vLLM makes one receiver in each of the engine's processes, by the backend's name. vLLM packs matrices for its kernels and frees the
originals, so weights cannot be assigned: they go through its layerwise reload, between start and finish.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.utils.nccl import unpinned_nccl_env

from cluster.contracts.errors import BroadcastError, TreadwheelError, WeightsError
from cluster.weights.parent import end_with_parent
from cluster.weights.process_group import Incoming, Receiver

BACKEND = "treadwheel_host_tensors"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: host tensors need no rendezvous, and a group comes with its weights, since its members change."""


@dataclass
class HostTensors(WeightTransferUpdateInfo):
    """One chunk of an update."""

    tensors: Iterable[tuple[str, torch.Tensor]] | Incoming
    """Checkpoint names and CPU tensors, which must stay alive until the update is finished, or the group to take them from."""
    repair_tied_head: bool = True
    """False keeps vLLM's stale vocabulary head of tied models on CPUs, to show that the canary detects it."""


class HostTensorReceiver(WeightTransferEngine[NoInitInfo, HostTensors]):
    """Loads checkpoint-format host tensors into the engine's model, in place."""

    init_info_cls = NoInitInfo
    update_info_cls = HostTensors

    _repair_tied_head = True
    failures: tuple[TreadwheelError, ...] = ()
    """Errors of the last update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver = Receiver()

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        if current_platform.is_cpu():
            self._forget_kernels_of_experts()

    # The inherited method synchronizes an accelerator, which a CPU engine does not have.
    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostTensors) -> None:
        self._repair_tied_head = update_info.repair_tied_head
        model: Any = self.model
        tensors = update_info.tensors
        place = self.parallel_config.rank
        try:
            if not isinstance(tensors, Incoming):
                model.load_weights(iter(tensors))
                return
            # vLLM may set NCCL variables for its own processes. The learner does not have them.
            with unpinned_nccl_env():
                model.load_weights(self._receiver.tensors(tensors, place=place, device=self.device))
        except (BroadcastError, WeightsError) as error:
            # Not raised: the update must still be finished, or the next one would continue with half of this one's layers. And an error
            # of one process would leave the others' answers unread, which vLLM's next call would take for its own.
            self.failures = (error,)
        except Exception:
            self._drop_half_loaded()
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self._repair_tied_head:
            self._repack_tied_heads()

    def shutdown(self) -> None:
        self._receiver.leave()

    def _drop_half_loaded(self) -> None:
        # vLLM ends a refused update without finishing it: the next one would continue with the tensors that this one could not load.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.load_numel, info.loaded_weights = 0, []
        finalize_layerwise_reload(self.model, self.model_config)

    def _forget_kernels_of_experts(self) -> None:
        # On CPUs vLLM packs experts once, when it makes their kernel: it would read later weights as packed, which they are not.
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _repack_tied_heads(self) -> None:
        # A tied head shares the embedding's storage, so the reload finds no weights for it and keeps the old packed copy.
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        layers: list[Any] = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        for head in layers:
            if not isinstance(head, ParallelLMHead):
                continue
            # vLLM packs an embedding like a head but never uses that copy, since it looks tokens up in the storage.
            embedding = next((each for each in layers if each is not head and each.weight is head.weight), None)
            if embedding is not None and hasattr(embedding, "cpu_linear"):
                head.cpu_linear = embedding.cpu_linear
            else:
                head.quant_method.process_weights_after_loading(head)


class ReceiverRegistration:
    """vLLM mixes this into its worker class (`worker_extension_cls`). Importing the module registers the receiver in that process."""

    weight_transfer_engine: HostTensorReceiver
    model_runner: Any

    def drain_failures(self) -> tuple[TreadwheelError, ...]:
        """Returns and clears the errors of the last update. A tuple, because vLLM treats a returned error as raised."""
        failures, self.weight_transfer_engine.failures = self.weight_transfer_engine.failures, ()
        return failures

    def unused_of_adapter(self, number: int) -> list[str]:
        """Modules that compute without the adapter's matrices for them. vLLM looks only at the last part of a name, and misses a layer that
        is called by another name (the gate of Qwen2-MoE's shared expert)."""
        adapters: Any = self.model_runner.lora_manager._adapter_manager
        layers: dict[str, Any] = adapters.modules
        named = {id(layer.base_layer): name for name, layer in layers.items() if hasattr(layer, "base_layer")}
        everywhere = adapters.model.named_modules(remove_duplicate=False)
        bypassed = {named.get(id(part)) for name, part in everywhere if not name.endswith(".base_layer")}
        return sorted(adapters.get_adapter(number).loras.keys() - (layers.keys() - bypassed))


def register() -> None:
    """Registers the receiver with vLLM in this process. May be called again."""
    # The factory refuses a second registration and has no public query.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostTensorReceiver)


register()
# A vLLM process notices its parent's end only between two calls: not while it loads the model, and never while it waits for another process
# in a collective operation.
end_with_parent()

"""Builds a rank's policy and critic as one module: loaded, sharded over several ranks, and proven to compute what the model computes."""

import copy
from typing import cast

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModel, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import LearnerConfig, ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import Ranks, reshard, shard
from learner.model.attention import FLASH
from learner.model.compiling import compile_layers
from learner.model.critic import Critic, Networks, check_sequence_parallel, critic_config, refuse_another_architecture
from learner.model.linear import multiply_fast
from learner.model.loading import load_shards, materialise, read_score, skeleton
from learner.model.lora import add_adapters
from learner.model.policy import (
    CRITIC_PATH,
    PolicyModel,
    choose_layout,
    fix_rotations,
    load,
    load_backbone,
    unproven,
)
from learner.shape import read_config


def build(config: RunConfig, *, ranks: Ranks) -> tuple[Networks, str]:
    """Policy and critic, and how they were loaded: whole on one rank, as float32 shards on several.

    One rank runs the proof in float32 (flash attention: 16 bits). Several ranks run it in the model's dtype, as they gather their shards.
    """
    model, learner, value = config.model, config.learner, config.algorithm.value
    compute_dtype: torch.dtype = getattr(torch, model.dtype)
    is_sharded = ranks.mesh is not None
    check_sequence_parallel(config)
    _refuse_quantized(model)
    causal_lm = skeleton(model) if is_sharded else load(model, dtype=torch.float32, device=ranks.device)
    _refuse_fused_storage(causal_lm, path=model.path)
    policy = unproven(
        causal_lm,
        sampling=config.sampling,
        head_chunk_tokens=learner.head_chunk_tokens,
        kept_logits_bytes=learner.kept_logits_bytes,
        replays_routing=config.rollout.routing_replay,
    )
    own, backbone = critic_config(model, value), None
    if own is not None and value is not None:
        _refuse_quantized(own, field=CRITIC_PATH)
        backbone = _backbone(own, policy=policy, value=value, is_sharded=is_sharded)
    critic = None if value is None else Critic(policy, backbone=backbone)
    networks = Networks(policy, critic, sequence_group=ranks.sequence_group)
    _prepare(networks, causal_lm, backbone, learner=learner, seed=config.seed)
    loading = "whole"
    if is_sharded:
        shard(networks, ranks=ranks, compute_dtype=compute_dtype)
        register_fsdp_forward_method(networks, "own_logits")
        materialise(networks, device=ranks.device)
        loading = load_shards(networks, model=model, critic=own, ranks=ranks, seed=config.seed)
    elif critic is not None and own is not None:
        critic.start_head(read_score(own))
    fix_rotations(networks, model=model)
    choose_layout(
        policy,
        forward=lambda batch: networks(batch)[0],
        own_logits=networks.own_logits,
        model=model,
        packing=learner.packing,
        dtype=compute_dtype if is_sharded or model.attention == FLASH else torch.float32,
        splits_sequences=ranks.sequence_group is not None,
    )
    if backbone is not None:
        backbone.set_attn_implementation(causal_lm.config._attn_implementation or "eager")
    reshard(networks)
    if learner.compile:
        # After the proof: with one rank it runs in float32, and training in bfloat16 would compile everything again.
        compile_layers(networks)
    return networks, loading


def _refuse_quantized(model: ModelConfig, *, field: str = "model.path") -> None:
    """Raises ConfigError for quantized weights, which the learner neither trains nor saves."""
    found = getattr(read_config(model, field=field), "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise ConfigError(
            f"{field}={model.path!r} has quantized weights ({method or 'of an unknown kind'}), and the learner trains plain ones; give "
            "the model's form in bfloat16"
        )


def _refuse_fused_storage(causal_lm: PreTrainedModel, *, path: str) -> None:
    """Raises ConfigError for a model that stores several layers in one tensor: tensors are exported one by one and are not fused."""
    for each in get_model_conversion_mapping(causal_lm, add_legacy=False):
        if isinstance(each, WeightConverter) and len(each.target_patterns) > 1:
            raise ConfigError(
                f"model.path={path!r}: a {type(causal_lm).__name__} is stored with several layers in one tensor "
                f"({', '.join(each.source_patterns)}), which is not written here; take another model"
            )


def _backbone(own: ModelConfig, *, policy: PolicyModel, value: ValueConfig, is_sharded: bool) -> PreTrainedModel:
    """The critic's own backbone; a skeleton if the policy is one. Raises ConfigError for another architecture than the policy's."""
    causal_lm = policy.causal_lm
    if value.path is None:
        return cast(PreTrainedModel, copy.deepcopy(causal_lm.base_model))
    backbone = (
        skeleton(own, kind=AutoModel, field=CRITIC_PATH) if is_sharded else load_backbone(own, device=causal_lm.device)
    )
    refuse_another_architecture(backbone, like=causal_lm, path=value.path)
    return backbone


def _prepare(networks: Networks, *models: PreTrainedModel | None, learner: LearnerConfig, seed: int) -> None:
    """Adds adapters and activation checkpointing to the networks' models as configured, and lets linear layers multiply in the type that is
    faster on this processor. Works on a skeleton too.

    Only layers with activation checkpointing are in train mode, which they need for it. All others stay in eval mode: routers that sample
    experts or add jitter in train mode would compute another policy than the sampler's.
    """
    for model in filter(None, models):
        if learner.lora is not None:
            add_adapters(model, lora=learner.lora, seed=seed)
        if learner.activation_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ConfigError(
                    f"learner.activation_checkpointing=true: a {type(model).__name__} has no layers that checkpoint their activations; "
                    "leave it out for this model"
                )
            model.gradient_checkpointing_enable({"use_reentrant": False})
    multiply_fast(networks)
    networks.eval()
    for part in networks.modules():
        part.training = bool(getattr(part, "gradient_checkpointing", False))

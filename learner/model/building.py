"""What a rank computes with: policy and critic as one module, sharded where there are several ranks, and proven."""

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import LearnerConfig, ModelConfig
from learner.distributed import Ranks, shard
from learner.model.critic import Critic, Networks
from learner.model.loading import load_shards, materialise, skeleton
from learner.model.lora import add_adapters
from learner.model.policy import PolicyModel, choose_layout, load, unproven


def build(
    model: ModelConfig,
    *,
    learner: LearnerConfig,
    value: ValueConfig | None,
    temperature: float,
    seed: int,
    ranks: Ranks,
    compute_dtype: torch.dtype,
) -> tuple[Networks, str]:
    """Policy and critic (None: no critic), and how they were loaded: whole on one rank, as float32 shards on several.

    One rank proves and returns them in float32; several gather their shards in `compute_dtype`, and prove that.
    """
    is_sharded = ranks.mesh is not None
    causal_lm = skeleton(model) if is_sharded else load(model, dtype=torch.float32, device=ranks.device)
    policy = unproven(causal_lm, temperature=temperature, head_chunk_tokens=learner.head_chunk_tokens)
    networks = _assembled(policy, learner=learner, value=value, seed=seed)
    loading = "whole"
    if is_sharded:
        shard(networks, causal_lm, ranks=ranks, compute_dtype=compute_dtype)
        register_fsdp_forward_method(networks, "own_logits")
        materialise(networks, device=ranks.device)
        loading = load_shards(networks, model=model, ranks=ranks, seed=seed)
    choose_layout(
        policy,
        forward=lambda batch: networks(batch)[0],
        own_logits=networks.own_logits,
        model=model,
        packing=learner.packing,
        dtype=compute_dtype if is_sharded else torch.float32,
    )
    if networks.critic is not None and networks.critic.backbone is not None:
        networks.critic.backbone.set_attn_implementation(causal_lm.config._attn_implementation or "eager")
    if isinstance(networks, FSDPModule):
        # The root stays gathered after a forward pass without a backward one.
        networks.reshard()
    return networks, loading


def _assembled(policy: PolicyModel, *, learner: LearnerConfig, value: ValueConfig | None, seed: int) -> Networks:
    """With adapters and critic where they are wanted; works on a skeleton too."""
    causal_lm = policy.causal_lm
    if learner.lora is not None:
        add_adapters(causal_lm, lora=learner.lora, seed=seed)
    networks = Networks(policy, None if value is None else Critic(policy, backbone=value.backbone))
    if not learner.activation_checkpointing:
        return networks.eval()
    for module in (causal_lm, None if networks.critic is None else networks.critic.backbone):
        if module is not None:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    return networks.train()

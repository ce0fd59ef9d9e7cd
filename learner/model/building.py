"""What a rank of the learner is made of: its device, the check that its model fits, policy and critic. The learner calls it once."""

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import RankGroup, shard
from learner.memory import check_fits, estimate, free_bytes
from learner.model.critic import Critic, Networks
from learner.model.loading import load_shards, materialise, skeleton
from learner.model.lora import add_adapters
from learner.model.policy import PolicyModel, choose_layout, load, read_config, unproven


def choose_device(config: RunConfig) -> torch.device:
    """Raises ConfigError when GPUs are asked for and there is none."""
    if config.learner.gpus_per_rank == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_per_rank={config.learner.gpus_per_rank}, but torch sees no GPU here; "
            "set it to 0, or place the learner on a GPU node"
        )
    return torch.device("cuda", torch.cuda.current_device())


def check_memory(config: RunConfig, *, device: torch.device) -> None:
    """Raises ConfigError, before anything is loaded, when the model does not fit into what is free."""
    value = config.algorithm.value
    estimated = estimate(
        read_config(config.model),
        model=config.model,
        learner=config.learner,
        checkpoint=config.checkpoint,
        has_own_critic=value is not None and value.backbone == "own",
    )
    check_fits(estimated, free_bytes=free_bytes(device), model=config.model)


def build(config: RunConfig, *, group: RankGroup, compute_dtype: torch.dtype) -> tuple[Networks, str]:
    """Policy and critic, proven, and how they were loaded: whole on one rank, as float32 shards on several.

    One rank proves and returns them in float32; several gather their shards in `compute_dtype`, and prove that.
    """
    is_sharded = group.mesh is not None
    causal_lm = skeleton(config.model) if is_sharded else load(config.model, dtype=torch.float32, device=group.device)
    policy = unproven(
        causal_lm, temperature=config.sampling.temperature, head_chunk_tokens=config.learner.head_chunk_tokens
    )
    networks = _assembled(policy, config=config)
    loading = "whole"
    if is_sharded:
        shard(networks, causal_lm, group=group, compute_dtype=compute_dtype)
        register_fsdp_forward_method(networks, "own_logits")
        materialise(networks, device=group.device)
        loading = load_shards(networks, model=config.model, group=group, seed=config.seed)
    choose_layout(
        policy,
        forward=lambda batch: networks(batch)[0],
        own_logits=networks.own_logits,
        model=config.model,
        packing=config.learner.packing,
        dtype=compute_dtype if is_sharded else torch.float32,
    )
    if networks.critic is not None and networks.critic.backbone is not None:
        networks.critic.backbone.set_attn_implementation(causal_lm.config._attn_implementation or "eager")
    if isinstance(networks, FSDPModule):
        # The root stays gathered after a forward pass without a backward one.
        networks.reshard()
    return networks, loading


def _assembled(policy: PolicyModel, *, config: RunConfig) -> Networks:
    """With adapters and critic where they are wanted; works on a skeleton too."""
    causal_lm, value = policy.causal_lm, config.algorithm.value
    if config.learner.lora is not None:
        add_adapters(causal_lm, lora=config.learner.lora, seed=config.seed)
    networks = Networks(policy, None if value is None else Critic(policy, backbone=value.backbone))
    if not config.learner.activation_checkpointing:
        return networks.eval()
    for module in (causal_lm, None if networks.critic is None else networks.critic.backbone):
        if module is not None:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    return networks.train()

"""What a rank of the learner is made of: its device, the check that its model fits, policy and critic. The learner calls it once."""

import torch

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from learner.critic import Critic, Networks
from learner.group import Group, shard
from learner.lora import add_adapters
from learner.memory import check_fits, estimate, free_bytes
from learner.model import load, prove, read_config


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
        has_own_critic=value is not None and value.backbone == "own",
    )
    check_fits(estimated, free_bytes=free_bytes(device), model=config.model)


def build(config: RunConfig, *, group: Group, compute_dtype: torch.dtype) -> Networks:
    """Policy and critic, proven, in the compute type on one rank, as float32 shards on several."""
    causal_lm = load(config.model, dtype=torch.float32, device="cpu" if group.size > 1 else group.device)
    policy = prove(
        causal_lm,
        model=config.model,
        packing=config.learner.packing,
        temperature=config.sampling.temperature,
        head_chunk_tokens=config.learner.head_chunk_tokens,
    )
    value = config.algorithm.value
    if config.learner.lora is not None:
        add_adapters(causal_lm, lora=config.learner.lora)
    networks = Networks(policy, None if value is None else Critic(policy, backbone=value.backbone))
    if config.learner.activation_checkpointing:
        for module in (causal_lm, None if networks.critic is None else networks.critic.backbone):
            if module is not None:
                module.gradient_checkpointing_enable({"use_reentrant": False})
        networks.train()
    else:
        networks.eval()
    if group.size > 1:
        shard(networks, causal_lm, group=group, compute_dtype=compute_dtype)
    return networks

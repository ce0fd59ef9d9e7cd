"""What leaves the learner: weights by checkpoint name, one whole tensor at a time, and the canary that proves them. The learner calls it.

Shapes: C probe tokens after the first.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cluster.weights.manifest import Canary
from learner.model.critic import Networks
from learner.model.lora import adapters, merged
from learner.model.policy import output_layer, score, token_row


def probe_token_ids(vocabulary_size: int, *, num_tokens: int) -> list[int]:
    """A fixed sequence spread over the vocabulary: the same for every version, so that only weights change its log-probs."""
    return [(i * 2_654_435_761 + 12_345) % vocabulary_size for i in range(1, num_tokens + 1)]


def canary_of(networks: Networks, *, num_tokens: int, device: torch.device) -> Canary:
    """The probe's log-probs at temperature 1 under the present weights; all ranks must call it."""
    policy = networks.policy
    limit = getattr(policy.causal_lm.config.get_text_config(), "max_position_embeddings", None) or num_tokens
    token_ids = probe_token_ids(output_layer(policy.causal_lm).weight.shape[0], num_tokens=min(num_tokens, limit))
    row = token_row(token_ids[:1], token_ids[1:])
    at_run_temperature, policy.head = policy.head, dataclasses.replace(policy.head, temperature=1.0)
    try:
        (logprobs_C,) = score(
            lambda batch: networks(batch)[0], [row], layout=policy.layout, max_tokens=num_tokens, device=device
        )
    finally:
        policy.head = at_run_temperature
        if isinstance(networks, FSDPModule):
            # The root stays gathered after a forward pass without a backward one; shards are what is exported and trained.
            networks.reshard()
    return Canary(token_ids=tuple(token_ids), logprobs=tuple(logprobs_C.tolist()))


@torch.no_grad()
def exported_adapter(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, whole tensor in `dtype`) of the adapter alone; gathered tensor by tensor, on all ranks."""
    for name, tensor in adapters(causal_lm):
        yield name, tensor.to(dtype)


@torch.no_grad()
def exported(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, whole tensor in `dtype`), tied ones once; a sharded model is gathered tensor by tensor, on all ranks."""
    converts = bool(getattr(causal_lm, "_weight_conversions", None))
    for name, tensor in merged(causal_lm):
        tensor = tensor.to(dtype)
        # Some families are computed in another form than they are stored (fused experts).
        yield from revert_weight_conversion(causal_lm, {name: tensor}).items() if converts else [(name, tensor)]

"""What leaves the learner: weights by checkpoint name, one whole tensor at a time, and the log-probs that prove them.

Shapes: C probe tokens after the first.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.model.critic import Networks
from learner.model.lora import adapters, merged
from learner.model.policy import output_layer, score, token_row


def spread_token_ids(causal_lm: PreTrainedModel, *, num_tokens: int) -> list[int]:
    """A sequence spread over the vocabulary, for a learner that was given no probe: unlikely text, which rounding blurs most."""
    limit = getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None) or num_tokens
    vocabulary_size = output_layer(causal_lm).weight.shape[0]
    return [(i * 2_654_435_761 + 12_345) % vocabulary_size for i in range(1, min(num_tokens, limit) + 1)]


def probe_logprobs(networks: Networks, token_ids: Sequence[int], *, device: torch.device) -> tuple[float, ...]:
    """Log-probs of the tokens after the first, at temperature 1, under the present weights; all ranks must call it."""
    policy = networks.policy
    row = token_row(token_ids[:1], token_ids[1:])
    try:
        with policy.full_softmax(temperature=1.0):
            (logprobs_C,) = score(
                lambda batch: networks(batch)[0], [row], layout=policy.layout, max_tokens=len(token_ids), device=device
            )
    finally:
        if isinstance(networks, FSDPModule):
            # The root stays gathered after a forward pass without a backward one; shards are what is exported and trained.
            networks.reshard()
    return tuple(logprobs_C.tolist())


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

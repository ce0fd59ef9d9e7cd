"""Publishes the learner's weights: by checkpoint name, one whole tensor at a time, with the log-probs that attest them.

Shapes: C probe tokens after the first.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cluster.contracts.config import RunConfig
from cluster.weights.delta import PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest, packing
from cluster.weights.model_files import fingerprint
from learner.distributed import Ranks, reshard
from learner.model.critic import Networks
from learner.model.lora import adapter_of, adapters, merged
from learner.model.policy import output_layer, score, token_row
from learner.progress import Phases


class Publisher:
    """Packs the weights of a rank, with a canary that attests them."""

    def __init__(
        self, networks: Networks, *, config: RunConfig, ranks: Ranks, phases: Phases, probe_token_ids: Sequence[int]
    ) -> None:
        """Create it before a checkpoint is restored: the canary contains log-probs of the weights that engines start from."""
        self._networks, self._config, self._ranks, self._phases = networks, config, ranks, phases
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        spread = spread_token_ids(networks.policy.causal_lm, num_tokens=config.weights.canary_tokens)
        self._probe = tuple(probe_token_ids or spread)
        self._starting_logprobs = probe_logprobs(networks, self._probe, device=ranks.device)
        self._starting_files = fingerprint(config.model)
        self._copy = PublishedCopy() if config.weights.deltas and ranks.rank == 0 else None

    def parts(self, policy_version: int) -> Iterator[np.ndarray | WeightManifest]:
        """Yields the results of `packing`, or with `weights.deltas` of `PublishedCopy.compared`, on rank 0. All ranks must iterate."""
        packed = self._packed(policy_version)
        return self._copy.compared(packed) if self._copy else packed

    def _packed(self, policy_version: int) -> Iterator[np.ndarray | WeightManifest]:
        causal_lm, adapter = self._networks.policy.causal_lm, None
        named = exported(causal_lm, dtype=self._dtype)
        if (lora := self._config.published_adapter) is not None:
            adapter, named = adapter_of(causal_lm, lora=lora), adapters(causal_lm, dtype=self._dtype)
        if self._ranks.rank != 0:
            for _ in named:
                self._phases.move()
            self._canary()
            return
        bucket_bytes = self._config.weights.bucket_bytes
        for part in packing(
            named, policy_version=policy_version, bucket_bytes=bucket_bytes, canary=self._canary, adapter=adapter
        ):
            self._phases.move()
            yield part

    def _canary(self) -> Canary:
        """The canary of the present weights; all ranks must call it."""
        return Canary(
            token_ids=self._probe,
            logprobs=probe_logprobs(self._networks, self._probe, device=self._ranks.device),
            starting_logprobs=self._starting_logprobs,
            starting_files=self._starting_files,
        )


def spread_token_ids(causal_lm: PreTrainedModel, *, num_tokens: int) -> list[int]:
    """Tokens spread over the vocabulary, for a learner without a probe. Such text is unlikely, so rounding changes its log-probs most."""
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
                lambda batch: networks(batch)[0].logprobs_C,
                [row],
                layout=policy.layout,
                max_tokens=len(token_ids),
                device=device,
            )
    finally:
        reshard(networks)  # shards are what is exported and trained
    return tuple(logprobs_C.tolist())


@torch.no_grad()
def exported(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, whole tensor in `dtype`), tied ones once. A sharded model is gathered tensor by tensor; all ranks must iterate.

    Buffers of the checkpoint, such as a router's bias, come last and keep their type. They are not trained, but engines need them: vLLM
    loads whole layers, and an engine that slept without its weights has lost them.
    """
    converts = bool(getattr(causal_lm, "_weight_conversions", None))
    named = ((name, tensor.to(dtype)) for name, tensor in merged(causal_lm))
    for name, tensor in chain(named, _stored_buffers(causal_lm)):
        # Some model families compute in another form than they are stored in (fused experts).
        yield from revert_weight_conversion(causal_lm, {name: tensor}).items() if converts else [(name, tensor)]


def _stored_buffers(causal_lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    stored = causal_lm.state_dict().keys()
    return ((name, buffer) for name, buffer in causal_lm.named_buffers() if name in stored)

"""The reference: a frozen policy that scores tokens, to which the KL is measured (`cluster.contracts.protocols.LogprobModel`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.config import LearnerConfig, ModelConfig, ReferenceConfig, SamplingConfig
from learner.model.head import selected_logprobs, top_tokens
from learner.model.packing import MicroBatch, tokens_per_pass
from learner.model.policy import elsewhere, hidden_states, load_scorer, output_layer, prove, score, token_row


def reference_models(model: ModelConfig, reference: ReferenceConfig) -> dict[str | None, ModelConfig]:
    """The reference's models by prompt source; None is the key for all other sources. Raises ConfigError as `elsewhere` does."""
    plain = {"revision": None, "trust_remote_code": False}
    by_source = {
        source: model.model_copy(update=plain | {"path": path}) for source, path in reference.by_source.items()
    }
    return {None: elsewhere(model, reference, section="reference"), **by_source}


class ReferenceModel:
    """Loaded once, never trained."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        reference: ReferenceConfig,
        learner: LearnerConfig,
        sampling: SamplingConfig,
        top_k: int | None = None,
    ) -> None:
        """Loads `model`, one of `reference_models`, with the learner's packing. Raises ConfigError when it does not load.

        `top_k`: number of likeliest tokens scored at each position in addition to the completion's own; None for none.
        """
        num_threads = reference.num_threads or math.ceil(reference.cpus)
        self._policy = prove(
            load_scorer(model, gpus=reference.gpus, num_threads=num_threads),
            model=model,
            packing=learner.packing,
            sampling=sampling,
            head_chunk_tokens=learner.head_chunk_tokens,
        ).eval()
        self._device = self._policy.causal_lm.device
        self._max_tokens = tokens_per_pass(reference.max_tokens_per_micro_batch, device=self._device)
        self._top_k = top_k

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """The schema's `reference_` columns, in the given order. Log-probs are at the run's temperature and truncation."""
        rows = [token_row(p, c) for p, c in zip(prompts, completions, strict=True)]
        scored = score(self._scores, rows, layout=self._policy.layout, max_tokens=self._max_tokens, device=self._device)
        columns = {"reference_logprobs": [scores[:, 0].tolist() for scores in scored]}
        if self._top_k is None:
            return columns
        partitions = [scores[:, 1:].tensor_split([scores.shape[1] // 2 - 1], 1) for scores in scored]
        return columns | {
            "reference_top_ids": [ids.flatten().int().numpy() for ids, _ in partitions],
            "reference_top_logprobs": [logprobs.flatten().float().numpy() for _, logprobs in partitions],
        }

    def _scores(self, batch: MicroBatch) -> Tensor:
        """One row per position: own log-prob, ids of the likeliest tokens, and their partition."""
        if self._top_k is None:
            return self._policy(batch).logprobs_C[:, None]
        causal_lm, head = self._policy.causal_lm, self._policy.head
        hidden_CH, output = hidden_states(causal_lm, batch), output_layer(causal_lm)
        ids_CK = top_tokens(hidden_CH, output.weight, num_tokens=self._top_k, head=head, bias_V=output.bias)
        selected = selected_logprobs(
            hidden_CH, output.weight, batch.targets_C, head=head, bias_V=output.bias, candidates_CK=ids_CK
        )
        assert selected.partition_CP is not None
        # float64 represents ids exactly.
        return torch.cat([selected.logprobs_C[:, None], ids_CK.double(), selected.partition_CP], 1)

"""A frozen policy that scores tokens: the model that the KL pulls towards (`cluster.contracts.protocols.LogprobModel`)."""

import math
from collections.abc import Sequence

import torch

from cluster.contracts.config import LearnerConfig, ModelConfig, ReferenceConfig, SamplingConfig
from learner.model.packing import tokens_per_pass
from learner.model.policy import elsewhere, load, prove, score, token_row


def reference_models(model: ModelConfig, reference: ReferenceConfig) -> dict[str | None, ModelConfig]:
    """The models that a reference is, by source; None is for all other sources. Raises ConfigError as `elsewhere` does."""
    plain = {"revision": None, "trust_remote_code": False}
    by_source = {
        source: model.model_copy(update=plain | {"path": path}) for source, path in reference.by_source.items()
    }
    return {None: elsewhere(model, reference, section="reference"), **by_source}


class ReferenceModel:
    """Loaded once, never trained."""

    def __init__(
        self, model: ModelConfig, *, reference: ReferenceConfig, learner: LearnerConfig, sampling: SamplingConfig
    ) -> None:
        """Loads `model`, one of `reference_models`, and lays rows out as the learner does. Raises ConfigError when it does not load."""
        torch.set_num_threads(reference.num_threads or math.ceil(reference.cpus))
        device = torch.device("cuda" if reference.gpus else "cpu")
        self._policy = prove(
            load(model, dtype=getattr(torch, model.dtype), device=device),
            model=model,
            packing=learner.packing,
            sampling=sampling,
            head_chunk_tokens=learner.head_chunk_tokens,
        ).eval()
        self._policy.requires_grad_(False)
        self._max_tokens = tokens_per_pass(reference.max_tokens_per_micro_batch, device=device)
        self._device = device

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per completion token, natural log, at the run's temperature and truncation; in the order given."""
        rows = [token_row(p, c) for p, c in zip(prompts, completions, strict=True)]
        layout = self._policy.layout
        scored = score(self._policy, rows, layout=layout, max_tokens=self._max_tokens, device=self._device)
        return [logprobs_C.tolist() for logprobs_C in scored]

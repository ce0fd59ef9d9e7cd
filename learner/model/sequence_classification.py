"""A frozen reward model of transformers, `...ForSequenceClassification` (`cluster.contracts.protocols.ClassifyingModel`).

A causal model's score is read at the last token of each text, by the text's length. transformers looks for the last token that is not
padding: that is the wrong one if the padding token also ends a turn, and there is none without a padding token.
Shapes: B texts of a pass, L labels, T tokens.
"""

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.contracts.reward_config import JudgeServerConfig, RewardModelConfig
from learner.model.loading import skeleton, stored_tensors
from learner.model.packing import MicroBatch, tokens_per_pass
from learner.model.policy import PROOF_TOLERANCE, hidden_states, load_scorer, score, token_row


def num_bytes(config: RewardModelConfig | JudgeServerConfig, *, field: str) -> int:
    """Bytes of the model's weights, without a language model's head. Raises ConfigError as `skeleton` does."""
    kind = AutoModelForSequenceClassification if isinstance(config, RewardModelConfig) else AutoModel
    model = as_model(config)
    built = skeleton(model, kind=kind, field=f"{field}.path")
    return sum(each.numel() for each in built.parameters()) * model.item_bytes


def as_model(config: RewardModelConfig | JudgeServerConfig) -> ModelConfig:
    return ModelConfig(path=config.path, revision=config.revision, dtype=config.dtype)


class SequenceClassifier:
    """Loaded once, never trained."""

    def __init__(self, config: RewardModelConfig, *, field: str, num_threads: int = 1) -> None:
        """Raises ConfigError naming `field` for a model that does not load, or that scores a text in a batch differently than alone."""
        model, kind = as_model(config), AutoModelForSequenceClassification
        self._model = load_scorer(model, gpus=config.gpus, num_threads=num_threads, kind=kind, field=f"{field}.path")
        self._device = self._model.device
        _compute_head_in_float32(self._model, stored=model)
        self._is_causal = isinstance(getattr(self._model, "score", None), nn.Linear)
        text = self._model.config.get_text_config()
        self._short_context = _short_context(text)
        self._pad_id = text.pad_token_id
        if self._pad_id is None and not self._is_causal:
            raise ConfigError(
                f"{field}.path={config.path!r} has no pad_token_id, which it needs to tell texts of a batch apart"
            )
        self._max_tokens = tokens_per_pass(config.max_tokens_per_micro_batch, device=self._device)
        self._prove(PROOF_TOLERANCE[getattr(torch, config.dtype)], field=field)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float] | str]:
        """[texts][L] in the given order: outputs before any softmax or sigmoid. A text that does not fit in memory gets an error text."""
        try:
            return [*self._scores(token_ids)]
        except torch.OutOfMemoryError as error:
            reason = f"{len(token_ids[0])} tokens: {headline(error)}"
        # Not inside `except`: there the error keeps the tensors of its frames alive.
        return [reason] if len(token_ids) == 1 else [each for ids in token_ids for each in self.score([ids])]

    def _scores(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        # A completion of one token after the text is predicted from the hidden state of the text's last token.
        rows = [token_row(ids, [0]) for ids in token_ids]
        found: dict[int, list[float]] = {}
        for is_long in (False, True):
            chosen = [index for index, ids in enumerate(token_ids) if (len(ids) > self._short_context) == is_long]
            alike = [rows[index] for index in chosen]
            scored = score(self._logits, alike, layout="padded", max_tokens=self._max_tokens, device=self._device)
            found |= {index: scores[0].tolist() for index, scores in zip(chosen, scored, strict=True)}
        return [found[index] for index in range(len(rows))]

    def _logits(self, batch: MicroBatch) -> Tensor:
        """[B, L], float32."""
        if self._is_causal:
            return cast(nn.Linear, self._model.score)(hidden_states(self._model, batch))
        ends_B = batch.head_index_C - torch.arange(len(batch.rows), device=self._device) * batch.input_ids.shape[1]
        is_text_BT = batch.position_ids <= ends_B[:, None]
        padded_BT = batch.input_ids.where(is_text_BT, self._pad_id)
        return self._model(input_ids=padded_BT, attention_mask=is_text_BT.long()).logits

    @torch.no_grad()
    def _prove(self, tolerance: float, *, field: str) -> None:
        """Scores a few texts of different lengths together, and each alone by the model's own forward."""
        ids = [each for each in range(3, 40) if each != self._pad_id]
        texts = [ids[:5], ids[5:17], ids[7:15]]
        own = [self._model(input_ids=torch.tensor([each], device=self._device)).logits[0].cpu() for each in texts]
        expected, found = torch.stack(own), torch.tensor(self._scores(texts))
        error = float((expected - found).abs().max() / expected.abs().max().clamp(min=1))
        if not error <= tolerance:
            raise ConfigError(
                f"{field}: {type(self._model).__name__} scores a text in a batch differently than alone (off by {error:.3g})"
            )


def _short_context(text: PretrainedConfig) -> int:
    """Length beyond which LongRoPE uses its other frequencies for a whole pass: longer texts go into passes of their own."""
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else sys.maxsize


def _compute_head_in_float32(model: PreTrainedModel, *, stored: ModelConfig) -> None:
    """Modules above the backbone compute in float32 with the stored weights: rounded weights would shift every score."""
    heads = {name: module for name, module in model.named_children() if module is not model.base_model}
    for module in heads.values():
        module.float()
        module.register_forward_pre_hook(_in_float32)
    for tensor in stored_tensors(stored):
        if tensor.is_plain and tensor.name.partition(".")[0] in heads:
            parameter = dict(model.named_parameters()).get(tensor.name)
            if parameter is not None:
                parameter.data.copy_(tensor.rows(slice(None)))


def _in_float32(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs)

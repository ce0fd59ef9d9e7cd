"""Reward model: a group of trajectories in, each one's scores by label out.

It encodes text with its own tokenizer. The model is an argument. A completion that it cannot read gets a reason instead of scores, never
a zero.
"""

import sys

import pyarrow as pa

from actors.chat.hub import config_and_tokenizer
from actors.reward_service.service import Told, told
from cluster.contracts import schema
from cluster.contracts.errors import ConfigError, DataError, headline
from cluster.contracts.protocols import ClassifyingModel
from cluster.contracts.reward_config import RewardModelConfig
from cluster.contracts.segments import whole
from cluster.weights.model_files import refuse_unpinned


class Reading:
    """Encodes trajectories for a reward model with the model's own tokenizer. Has no weights."""

    def __init__(self, config: RewardModelConfig, *, field: str) -> None:
        """Raises ConfigError naming `field` for a hub name without a commit, for a model that is not a classifier, and for a tokenizer that
        does not load or lacks the chat template that `messages` needs.
        """
        refuse_unpinned(config.path, config.revision, section=field)
        model, self._tokenizer = config_and_tokenizer(config.path, field=f"{field}.path", revision=config.revision)
        if not any("ForSequenceClassification" in each for each in model.architectures or ()):
            raise ConfigError(
                f"{field}.path={config.path!r} is a {', '.join(model.architectures or ('model',))} without a classification head; "
                "give a ...ForSequenceClassification"
            )
        if config.text == "messages" and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{field}.text='messages': the tokenizer of {config.path!r} has no chat template; use prompt_and_completion or "
                "completion, as the model was trained"
            )
        self._text = config.text
        self.labels: tuple[str, ...] = tuple(label for _, label in sorted(model.id2label.items()))
        """Labels of the model's outputs, in order. transformers calls the only output of a model without labels `LABEL_0`."""
        # RoBERTa's max_position_embeddings counts positions that no token can have; its tokenizer knows the real limit.
        longest = getattr(model.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self._max_tokens = min(longest, self._tokenizer.model_max_length)
        self._vocab_size: int = getattr(model.get_text_config(), "vocab_size", sys.maxsize)

    def read(self, trajectory: Told) -> list[int] | str:
        """Token ids, or the reason why the model cannot score the trajectory."""
        try:
            return self._token_ids(trajectory)
        except DataError as error:
            return str(error)

    def _token_ids(self, trajectory: Told) -> list[int]:
        """Raises DataError for a text that is empty or longer than the model's context, for a token id beyond its vocabulary, and for
        messages that the chat template refuses.
        """
        text = trajectory.completion
        if self._text == "prompt_and_completion":
            text = trajectory.prompt + text
        elif self._text == "messages":
            try:
                text = self._tokenizer.apply_chat_template(trajectory.messages, tokenize=False)
            except Exception as error:
                raise DataError(f"its chat template refuses: {type(error).__name__}: {headline(error)}") from error
        # The model's own template writes a bos itself. A prompt's text may hold the bos that the policy's template wrote: one stays.
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=self._text != "messages").input_ids
        if token_ids[:2] == [self._tokenizer.bos_token_id] * 2:
            del token_ids[0]
        if not token_ids:
            raise DataError("the text is empty: there is no token to score")
        if len(token_ids) > self._max_tokens:
            raise DataError(f"{len(token_ids)} tokens, and the model takes {self._max_tokens}")
        # On a GPU an id without an embedding ends the whole process, not only this call.
        if max(token_ids) >= self._vocab_size:
            raise DataError(f"its tokenizer writes token id {max(token_ids)}, and the model knows {self._vocab_size}")
        return token_ids


class RewardModel:
    """One frozen classifier."""

    def __init__(self, model: ClassifyingModel, *, reading: Reading) -> None:
        self._model = model
        self._reading = reading

    def score(self, batch: pa.RecordBatch) -> list[dict[str, float] | str]:
        """For each trajectory, the score of every label, or the reason why there is none.

        One call of the model per batch: a forward pass then depends on the group alone, and a repeated run gives the same bits. Raises
        DataError when the batch breaks the schema.
        """
        schema.validate(batch, ["info", "prompt_text", "completion_text", "messages"])
        batch = whole(batch)
        rows = [self._reading.read(each) for each in told(batch, schema.info_of(batch, 0))]
        scores = iter(self._model.score([row for row in rows if not isinstance(row, str)]))
        found = [row if isinstance(row, str) else next(scores) for row in rows]
        return [each if isinstance(each, str) else dict(zip(self._reading.labels, each, strict=True)) for each in found]

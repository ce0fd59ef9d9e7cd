"""Reward model: a group of trajectories in, the scores of each out, by label.

It reads text in its own tokens. The model is handed in. A completion that it cannot read has a reason instead of scores, never a zero.
"""

import sys
from typing import Any

import pyarrow as pa
from transformers import AutoConfig, AutoTokenizer

from actors.chat.hub import refuse_empty_tokenizer, why_not_loaded
from actors.reward_service.service import Told, told
from cluster.contracts import schema
from cluster.contracts.errors import ConfigError, DataError, headline
from cluster.contracts.protocols import ClassifyingModel
from cluster.contracts.reward_config import RewardModelConfig
from cluster.contracts.segments import whole
from cluster.weights.model_files import refuse_unpinned


class Reading:
    """What a reward model reads of a trajectory: text, in its own tokens. It has no weights."""

    def __init__(self, config: RewardModelConfig, *, field: str) -> None:
        """Raises ConfigError naming `field` for a hub name without a commit, for what is no classifier, and for a tokenizer that does not
        load or lacks the template that messages need.
        """
        refuse_unpinned(config.path, config.revision, section=field)
        try:
            model: Any = AutoConfig.from_pretrained(config.path, revision=config.revision)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.path, revision=config.revision)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}.path={config.path!r} does not load: {why_not_loaded(error)}") from error
        refuse_empty_tokenizer(self._tokenizer, path=config.path, field=f"{field}.path")
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
        """Of the model's outputs, in order. transformers calls the only output of a model that names none `LABEL_0`."""
        # A RoBERTa counts positions that no token takes; its tokenizer knows.
        longest = getattr(model.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self._max_tokens = min(longest, self._tokenizer.model_max_length)
        self._vocab_size: int = getattr(model.get_text_config(), "vocab_size", sys.maxsize)

    def read(self, trajectory: Told) -> list[int] | str:
        """Token ids, or why there are none that the model could score."""
        try:
            return self._token_ids(trajectory)
        except DataError as error:
            return str(error)

    def _token_ids(self, trajectory: Told) -> list[int]:
        """Raises DataError for more tokens than the model takes, for none, for one that it does not know, and for messages that the
        template refuses.
        """
        text = trajectory.completion
        if self._text == "prompt_and_completion":
            text = trajectory.prompt + text
        elif self._text == "messages":
            try:
                text = self._tokenizer.apply_chat_template(trajectory.messages, tokenize=False)
            except Exception as error:
                raise DataError(f"its chat template refuses: {type(error).__name__}: {headline(error)}") from error
        # A template writes its bos itself: the model's own in messages, and the policy's in a prompt.
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=self._text != "messages").input_ids
        if token_ids[:2] == [self._tokenizer.bos_token_id] * 2:
            del token_ids[0]
        if not token_ids:
            raise DataError("the text is empty: there is no token to score")
        if len(token_ids) > self._max_tokens:
            raise DataError(f"{len(token_ids)} tokens, and the model takes {self._max_tokens}")
        # On a GPU an id without an embedding costs the process, and not the call alone.
        if max(token_ids) >= self._vocab_size:
            raise DataError(f"its tokenizer writes token id {max(token_ids)}, and the model knows {self._vocab_size}")
        return token_ids


class RewardModel:
    """One frozen classifier."""

    def __init__(self, model: ClassifyingModel, *, reading: Reading) -> None:
        self._model = model
        self._reading = reading

    def score(self, batch: pa.RecordBatch) -> list[dict[str, float] | str]:
        """Of each trajectory, the score of every label, or why there is none.

        One call of the model per batch, so that what is computed together depends on the group alone, and a repeated run gives the same
        bits. Raises DataError when the batch breaks the schema.
        """
        schema.validate(batch, ["info", "prompt_text", "completion_text", "messages"])
        batch = whole(batch)
        rows = [self._reading.read(each) for each in told(batch, schema.info_of(batch, 0))]
        scores = iter(self._model.score([row for row in rows if not isinstance(row, str)]))
        said = [row if isinstance(row, str) else next(scores) for row in rows]
        return [each if isinstance(each, str) else dict(zip(self._reading.labels, each, strict=True)) for each in said]

"""Reward model: a group of trajectories in, the scores of each out, by label.

It reads text in its own tokens. The model is handed in. A completion that it cannot read has a reason instead of scores, never a zero.
"""

import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from transformers import AutoTokenizer

from actors.chat.hub import why_not_loaded
from actors.reward_service.service import conversation
from cluster.contracts import schema
from cluster.contracts.errors import ConfigError, DataError, headline
from cluster.contracts.protocols import ClassifyingModel
from cluster.contracts.reward_config import RewardModelConfig


class Reading:
    """What a reward model reads of a trajectory: text, in its own tokens."""

    def __init__(self, config: RewardModelConfig, *, max_tokens: int | None, field: str) -> None:
        """`max_tokens` is what the model's configuration says that it takes, None where it says nothing.

        Raises ConfigError naming `field` for a tokenizer that does not load, or lacks the template that messages need.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.path, revision=config.revision)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}.path={config.path!r} does not load: {why_not_loaded(error)}") from error
        if config.text == "messages" and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{field}.text='messages': the tokenizer of {config.path!r} has no chat template; use prompt_and_completion or "
                "completion, as the model was trained"
            )
        self._text = config.text
        # A RoBERTa counts positions that no token takes; its tokenizer knows.
        self._max_tokens = min(max_tokens or sys.maxsize, self._tokenizer.model_max_length)

    def token_ids(self, columns: Mapping[str, Any], *, prompt: str, completion: str) -> list[int]:
        """Raises DataError for more tokens than the model takes, for none, and for messages that the template refuses."""
        text = completion if self._text == "completion" else prompt + completion
        if self._text == "messages":
            messages = conversation(columns, prompt=prompt, completion=completion)
            try:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:
                raise DataError(f"its chat template refuses: {type(error).__name__}: {headline(error)}") from error
        # A template writes its bos itself.
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=self._text != "messages").input_ids
        if not token_ids:
            raise DataError("the text is empty: there is no token to score")
        if len(token_ids) > self._max_tokens:
            raise DataError(f"{len(token_ids)} tokens, and the model takes {self._max_tokens}")
        return token_ids


class RewardModel:
    """One frozen classifier."""

    def __init__(self, model: ClassifyingModel, *, reading: Reading) -> None:
        self._model = model
        self._reading = reading

    def score(self, batch: pa.RecordBatch) -> list[dict[str, float] | str]:
        """Of each row, the score of every label, or why there is none.

        One call of the model per batch, so that what is computed together depends on the group alone, and a repeated run gives the same
        bits. Raises DataError when the batch breaks the schema.
        """
        schema.validate(batch, ["info", "prompt_text", "completion_text"])
        rows = [self._read(batch, row) for row in range(batch.num_rows)]
        scores = iter(self._model.score([row for row in rows if not isinstance(row, str)]))
        labels = self._model.labels
        return [row if isinstance(row, str) else dict(zip(labels, next(scores), strict=True)) for row in rows]

    def _read(self, batch: pa.RecordBatch, row: int) -> list[int] | str:
        prompt, completion = batch["prompt_text"][row].as_py(), batch["completion_text"][row].as_py()
        try:
            return self._reading.token_ids(schema.info_of(batch, row), prompt=prompt, completion=completion)
        except DataError as error:
            return str(error)

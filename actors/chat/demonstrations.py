"""Demonstrations for `algorithm.sft`: completions of a prompt source, encoded as the model would have sampled them."""

from functools import lru_cache

from actors.chat.formatter import ChatFormatter
from cluster.contracts.algorithm_config import SftConfig
from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import DataError
from cluster.contracts.own_prompts import prompt_at
from cluster.contracts.plugins import prompt_source
from cluster.rollouts.tickets import epoch_order


class SourceDemonstrations:
    """Demonstrations of any update, computed without the earlier ones: every epoch is a permutation of the source, seeded by run seed and
    epoch."""

    def __init__(self, config: SftConfig, *, model: ModelConfig, seed: int) -> None:
        """Raises ConfigError for a source or tokenizer that does not open, DataError for a first row without a demonstration."""
        self._source = prompt_source(config.prompts, field="algorithm.sft.prompts")
        self._formatter = ChatFormatter.load(model)
        self._column, self._batch_size = config.column, config.batch_size
        size = len(self._source)
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(size, seed=seed, epoch=epoch))
        self._demonstration(0)

    def of_update(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Pairs of prompt ids and completion ids. Raises DataError naming a prompt without a completion or too long for the context."""
        first = number * self._batch_size
        places = (divmod(index, len(self._source)) for index in range(first, first + self._batch_size))
        return [self._demonstration(self._order(epoch)[place]) for epoch, place in places]

    def _demonstration(self, index: int) -> tuple[list[int], list[int]]:
        prompt = prompt_at(self._source, index)
        completion = prompt.columns.get(self._column)
        if not isinstance(completion, str):
            has = ", ".join(sorted(prompt.columns)) or "none"
            raise DataError(
                f"algorithm.sft.column={self._column!r}: prompt {prompt.prompt_id!r} has {str(completion)[:80]!r} there, which must be "
                f"a text; its columns: {has}",
                prompt_id=prompt.prompt_id,
            )
        return self._formatter.encode(prompt).token_ids, self._formatter.encode_completion(prompt, completion)

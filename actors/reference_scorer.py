"""Reference scorer: a group of trajectories in, the reference's columns of it out.

The model is handed in, one that computes log-probs exactly as the learner's does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from cluster.contracts import schema
from cluster.contracts.protocols import LogprobModel


class ReferenceScorer:
    """One frozen model, or several for groups of different sources."""

    def __init__(
        self, *, model: LogprobModel, by_source: Mapping[str, LogprobModel] | None = None, source_column: str = "source"
    ) -> None:
        """`by_source` scores the groups whose prompt has its key in `source_column`; `model` all others."""
        self._model = model
        self._by_source = by_source or {}
        self._source_column = source_column

    def score(self, *pieces: pa.RecordBatch | list[int]) -> tuple[pa.RecordBatch, dict[str, Any]]:
        """Columns with a log-prob for each completion token of the group, and what they tell its summary; tokens of tools and environments
        get one too.

        One call of the model per group, so that what is computed together depends on the group alone, and a repeated run gives
        the same bits. Raises DataError naming row and field when group or model break the schema.
        """
        (batch,) = schema.joined(pieces)
        schema.validate(batch, ["prompt_token_ids", "completion_token_ids", "info"])
        prompts, completions = batch["prompt_token_ids"].to_pylist(), batch["completion_token_ids"].to_pylist()
        # An episode that failed before its first token has nothing to score.
        scored = [row for row, completion in enumerate(completions) if completion]
        model = self._model
        if self._by_source:
            model = self._by_source.get(str(schema.info_of(batch, 0).get(self._source_column)), model)
        columns = model.score([prompts[row] for row in scored], [completions[row] for row in scored])
        made = schema.columns_of(batch, **{name: _spread(found, scored, batch) for name, found in columns.items()})
        return made, schema.added(made)


def _spread(found: Sequence[Any], rows: Sequence[int], batch: pa.RecordBatch) -> list[Any]:
    """One entry a row of the batch, empty for the rows that are not among these."""
    by_row = dict(zip(rows, found, strict=True))
    return [by_row.get(row, []) for row in range(batch.num_rows)]

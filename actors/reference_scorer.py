"""Reference scorer: groups of trajectories in, the reference model's columns for them out.

The model is an argument. It computes log-probs exactly as the learner's model does.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from cluster.contracts import schema
from cluster.contracts.protocols import LogprobModel


class ReferenceScorer:
    """One frozen model, or several for groups of different sources."""

    def __init__(
        self,
        *,
        model: LogprobModel,
        by_source: Mapping[str, LogprobModel] | None = None,
        source_column: str = "source",
        is_deterministic: bool = False,
    ) -> None:
        """A model of `by_source` scores the groups whose prompt has its key in `source_column`; `model` scores all others. In a
        deterministic run each group is scored by itself: a forward pass then depends on the group alone, and a repeated run gives the same
        bits."""
        self._model = model
        self._by_source = by_source or {}
        self._source_column = source_column
        self._is_deterministic = is_deterministic

    def score(self, *pieces: pa.RecordBatch | list[int]) -> tuple[Any, ...]:
        """For each group, columns with a log-prob per completion token, including tokens of tools and environments. The last element lists
        the additions to the groups' summaries.

        Raises DataError naming row and field when a group or the model breaks the schema.
        """
        groups = schema.joined(pieces)
        for group in groups:
            schema.validate(group, ["prompt_token_ids", "completion_token_ids", "info"])
        made = [columns for together in self._together(groups) for columns in self._columns(*together)]
        return *made, [schema.added(columns) for columns in made]

    def _together(self, groups: Sequence[pa.RecordBatch]) -> Iterator[tuple[LogprobModel, list[pa.RecordBatch]]]:
        """Groups in their order, with the model that scores them in one call."""
        for model, found in itertools.groupby(groups, key=self._model_of):
            together = [*found]
            yield from ((model, [each]) for each in together) if self._is_deterministic else [(model, together)]

    def _model_of(self, group: pa.RecordBatch) -> LogprobModel:
        if not self._by_source:
            return self._model
        return self._by_source.get(str(schema.info_of(group, 0).get(self._source_column)), self._model)

    @staticmethod
    def _columns(model: LogprobModel, groups: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prompts = [ids for group in groups for ids in group["prompt_token_ids"].to_pylist()]
        completions = [ids for group in groups for ids in group["completion_token_ids"].to_pylist()]
        # An episode that failed before its first token has nothing to score.
        scored = [row for row, completion in enumerate(completions) if completion]
        columns = model.score([prompts[row] for row in scored], [completions[row] for row in scored])
        spread = {name: _spread(found, scored, len(completions)) for name, found in columns.items()}
        start = 0
        for group in groups:
            end = start + group.num_rows
            yield schema.columns_of(group, **{name: found[start:end] for name, found in spread.items()})
            start = end


def _spread(found: Sequence[Any], rows: Sequence[int], num_rows: int) -> list[Any]:
    """One entry per row; empty for a row that is not in `rows`."""
    by_row = dict(zip(rows, found, strict=True))
    return [by_row.get(row, []) for row in range(num_rows)]

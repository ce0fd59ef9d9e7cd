"""Prompts of one or several sources. A stateless map from an index to a source and a place in it."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.own_prompts import prompt_at
from cluster.contracts.plugins import prompt_source
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of a mixture, and its rows in use."""

    name: str | None
    """None: the run has one source."""
    prompts: PromptSource
    rows: Sequence[int]
    """Rows of the prompts in use, without repeated ones."""
    weight: Fraction = Fraction(1)

    @property
    def num_duplicates(self) -> int:
        return len(self.prompts) - len(self.rows)


class Mixture:
    """Several sources as one, interleaved in proportion to their sizes, so that the first prompts come from all of them."""

    def __init__(self, sources: Sequence[Source], *, source_column: str) -> None:
        self.sources = sources
        scale = math.lcm(*(source.weight.denominator for source in sources))
        self.weights = [int(source.weight * scale) for source in sources]
        """Shares as integers, so that `place` is exact."""
        self._sizes = [len(source.rows) for source in sources]
        self._column = source_column

    @classmethod
    def of(cls, prompts: PromptSource) -> "Mixture":
        """A mixture of one source."""
        return cls([Source(name=None, prompts=prompts, rows=range(len(prompts)))], source_column="")

    def __len__(self) -> int:
        return sum(len(source.rows) for source in self.sources)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} is not in [0, {len(self)})")
        return self.prompt(*place(index, self._sizes))

    def prompt(self, number: int, position: int) -> Prompt:
        """The prompt at `position` of source `number`. Raises DataError as `prompt_at`, and if its column names another source."""
        source = self.sources[number]
        prompt = prompt_at(source.prompts, source.rows[position])
        if source.name is None:
            return prompt
        own = prompt.columns.get(self._column, source.name)
        if own != source.name:
            raise DataError(
                f"prompt {prompt.prompt_id!r} of the source {source.name!r} has {own!r} in its column {self._column!r}, where the name of "
                "its source goes; give reward.source_column another name, or leave the column out of the rows",
                prompt_id=prompt.prompt_id,
            )
        columns = {**prompt.columns, self._column: source.name}
        return replace(prompt, prompt_id=f"{source.name}/{prompt.prompt_id}", columns=columns)


def open_prompts(config: PromptsConfig, *, field: str, source_column: str = "source") -> Mixture:
    """Opens every source, and leaves out repeated prompts with `deduplicate`. Raises ConfigError as `prompt_source`."""
    if config.sources:
        named = {f"{field}.sources.{name}": (name, source) for name, source in config.sources.items()}
        opened = [
            Source(name=name, prompts=prompts, rows=range(len(prompts)), weight=Fraction(str(source.weight)))
            for setting, (name, source) in named.items()
            for prompts in [prompt_source(source, field=setting)]
        ]
    else:
        opened = Mixture.of(prompt_source(config, field=field)).sources
    if config.deduplicate:
        opened = _without_repeats(opened, field=field)
    return Mixture(opened, source_column=source_column)


def place(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """(number of the source that `index` falls to, count of earlier indices that fell to the same source).

    Each source in turn takes its share, evenly spaced, of the indices that the sources before it left. Of the first n indices a source of
    weight w has n w / sum(weights), with k sources to within max(1, k - 1). With the sizes of the sources as weights, the first
    sum(sizes) indices meet every prompt of every source once.
    """
    left = sum(weights)
    for number, weight in enumerate(weights):
        taken = -(-index * weight // left)
        if -(-(index + 1) * weight // left) > taken:
            return number, taken
        index, left = index - taken, left - weight
    raise AssertionError("the last source takes all that is left")


def _without_repeats(sources: Sequence[Source], *, field: str) -> list[Source]:
    seen = set[bytes]()
    kept: list[Source] = []
    for source in sources:
        rows = [row for row in source.rows if not _is_repeat(prompt_at(source.prompts, row), seen)]
        if not rows:
            raise ConfigError(
                f"{field}.sources.{source.name}: every prompt is one of an earlier source too, and deduplicate leaves none; leave it out"
            )
        kept.append(replace(source, rows=rows))
    return kept


def _is_repeat(prompt: Prompt, seen: set[bytes]) -> bool:
    content = json.dumps([prompt.text, prompt.messages], sort_keys=True).encode()
    digest = hashlib.blake2b(content, digest_size=16).digest()
    is_repeat = digest in seen
    seen.add(digest)
    return is_repeat

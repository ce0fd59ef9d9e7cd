"""Settings of prompts: their sources, and the selection and truncation of prompts before sampling."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, Section


class WeightedSource(Plugin):
    """One of several prompt sources: `{name: file, path: gsm8k.jsonl, weight: 2}`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class DifficultyConfig(Section, mark=Mark.MATHEMATICS):
    """Prefers prompts by their pass rate: the share of their trajectories that succeeded when they were last sampled.
    Without it, every prompt is sampled once an epoch."""

    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The preferred pass rate. A prompt that was never sampled counts as having this rate."""
    skip_solved_steps: NonNegativeInt = 10
    """Steps for which a prompt is skipped after all of its trajectories succeeded."""
    success_at: float = 1.0
    """A trajectory succeeds if its reward is at least this."""


class PromptsConfig(Plugin, Section, mark=Mark.MATHEMATICS):
    """A prompt source, `{name: file, path: train.jsonl}`, or several: `{sources: {gsm8k: {name: file, path: ..., weight: 2}, ...}}`."""

    name: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  frozen: nothing else is assigned
    """A name below actors.prompts: `reasoning_gym`, `file`, `dataset`. Its parameters are written next to it. Absent with `sources`."""
    params: dict[str, Any] = Field(default={})
    """The parameters of the source: all keys of the run file's mapping that are not settings of this section."""
    sources: dict[str, WeightedSource] = Field(default={})
    """Several sources by name, each with a `weight`: its share of the groups that are sampled, whichever of them `algorithm.filters` drop.
    Each prompt's column `reward.source_column` holds the name."""
    deduplicate: bool = False
    """Keeps only the first of prompts with the same text or messages, system prompt included; other columns are not compared. Opening
    the source then makes every prompt once."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, in tokens after the chat template; None is the context limit. Among the prompts that are checked before the run
    starts, one that leaves no room for `sampling.max_tokens` is an error. Such a prompt later in the run gets shorter completions."""
    on_long_prompt: Literal["error", "drop", "truncate_start", "truncate_end"] = "error"
    """Treatment of longer prompts. `drop` replaces a prompt by another of its source, drawn by seed and place. `truncate_start` and
    `truncate_end` shorten the text, or the first user message, at that end."""
    difficulty: DifficultyConfig | None = None

    @classmethod
    def _is_own(cls, key: str, value: Any) -> bool:
        # Some tasks of reasoning_gym have a parameter `difficulty`, a number.
        return super()._is_own(key, value) and (
            key != "difficulty" or isinstance(value, Mapping | DifficultyConfig | None)
        )

    @model_validator(mode="after")
    def _require_a_limit_to_act_on(self) -> "PromptsConfig":
        if self.on_long_prompt != "error" and self.max_prompt_tokens is None:
            raise ValueError(
                f"on_long_prompt={self.on_long_prompt!r} has no effect without max_prompt_tokens; set that, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _require_one_source_or_several(self) -> "PromptsConfig":
        if not self.sources and self.name is None:
            raise ValueError("no prompt source; write {name: file, path: train.jsonl}, or several in sources")
        if self.sources and (self.name is not None or self.params):
            raise ValueError(
                f"name={self.name!r} with sources: one source has a name and parameters, several are listed in sources; leave one out"
            )
        if "difficulty" in self.params and self.name in ("file", "dataset"):
            raise ValueError(
                f"difficulty={self.params['difficulty']!r} must be a mapping; write difficulty: {{target: 0.5}}"
            )
        for name in self.sources:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"sources.{name}: a source's name has letters, digits, _ and - only; rename it")
        return self

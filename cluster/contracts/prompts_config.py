"""Where prompts come from, and what is done with all of them before one is sampled."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, Section


class WeightedSource(Plugin):
    """A source among others: `{name: file, path: gsm8k.jsonl, weight: 2}`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class DifficultyConfig(Section, mark=Mark.MATHEMATICS):
    """Prefers prompts by the share of their trajectories that succeeded when they were last sampled, their pass rate."""

    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The pass rate that is preferred. A prompt that was not sampled yet counts as one of this rate."""
    skip_solved_steps: NonNegativeInt = 10
    """Steps for which a prompt rests after all of its trajectories succeeded."""
    success_at: float = 1.0
    """A trajectory succeeds when its reward is this or more."""


class PromptsConfig(Plugin, Section, mark=Mark.MATHEMATICS):
    """A prompt source, `{name: file, path: train.jsonl}`, or several: `{sources: {gsm8k: {name: file, path: ..., weight: 2}, ...}}`."""

    name: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  frozen: nothing else is assigned
    """A name below actors.prompts: `reasoning_gym`, `file`, `dataset`; the parameters of that source stand beside it. Absent with
    `sources`."""
    params: dict[str, Any] = Field(default={})
    """What a run file writes beside `name`, and is none of these settings."""
    sources: dict[str, WeightedSource] = Field(default={})
    """Several sources by name, each with a `weight`: its share of the groups that start. Every prompt has its source's name in the column
    `reward.source_column`."""
    deduplicate: bool = False
    """Of prompts with the same text or messages, system prompt included, the first one stays; the columns are not compared. Opening makes
    every prompt once."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, in tokens after the chat template; None is what the context takes. Of the prompts that a run looks at before it
    starts, one that leaves no room for `sampling.max_tokens` is an error; a later one is sampled in the room that is left."""
    on_long_prompt: Literal["error", "drop", "truncate_start", "truncate_end"] = "error"
    """What becomes of a longer prompt. `drop` puts another of its source, drawn by seed and place, in its place. `truncate_start` and
    `truncate_end` cut the text, or the first user message, at that side."""
    difficulty: DifficultyConfig | None = None
    """Prompts of middling difficulty more often, by measured pass rates; absent: every prompt once an epoch."""

    @classmethod
    def _is_own(cls, key: str, value: Any) -> bool:
        # Some tasks of reasoning_gym have a `difficulty` of their own, a number.
        return super()._is_own(key, value) and (
            key != "difficulty" or isinstance(value, Mapping | DifficultyConfig | None)
        )

    @model_validator(mode="after")
    def _require_a_limit_to_act_on(self) -> "PromptsConfig":
        if self.on_long_prompt != "error" and self.max_prompt_tokens is None:
            raise ValueError(
                f"on_long_prompt={self.on_long_prompt!r} acts beyond max_prompt_tokens alone; set that, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _require_one_source_or_several(self) -> "PromptsConfig":
        if not self.sources and self.name is None:
            raise ValueError("no source; write {name: file, path: train.jsonl}, or several in sources")
        if self.sources and (self.name is not None or self.params):
            raise ValueError(
                f"name={self.name!r} beside sources: one source has a name and parameters, several stand in sources; leave one out"
            )
        if "difficulty" in self.params and self.name in ("file", "dataset"):
            raise ValueError(
                f"difficulty={self.params['difficulty']!r} must be a mapping; write difficulty: {{target: 0.5}}"
            )
        for name in self.sources:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"sources.{name}: a source is named by letters, digits, _ and -; rename it")
        return self

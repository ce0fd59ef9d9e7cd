"""Settings of sampling, for training and for evaluation."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.settings import Mark, Resources, Section

Text = Annotated[str, Field(min_length=1)]
OwnSetting = Literal["max_tokens", "json_schema", "regex", "choice", "grammar"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
STRUCTURES = ("json_schema", "regex", "choice", "grammar")
"""Settings that force the format of a completion."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_BIASED = ("min_tokens", *PENALTIES, "logit_bias", "bad_words", *STRUCTURES)
"""Settings that change the engine's distribution and that the learner does not compute."""


class SamplingConfig(Section, mark=Mark.MATHEMATICS):
    """Sampling of completions. `rollout_logprobs` are those of the distribution from which a token was drawn, with all settings applied.

    Learner and reference apply temperature, top_k, top_p and min_p too. They ignore a setting marked *biased*: their log-probs are of the
    distribution without it, and `mismatch/*` measures the difference. See "Sampling and log-probs" in docs/algorithms.md.
    """

    max_tokens: PositiveInt = 1024
    """Maximum number of tokens in a completion."""
    min_tokens: NonNegativeInt = 0
    """Minimum number of tokens in a completion. *Biased* where it prevents an end."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """The learner divides its logits by it too, so that log-probs are comparable. vLLM refuses values above 2, and would sample
    at 0.01 for smaller ones."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the most likely tokens whose probabilities add up to this; 1 means all tokens."""
    top_k: NonNegativeInt = 0
    """Samples from this number of most likely tokens; 0 means all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Samples from the tokens with at least this share of the likeliest token's probability; 0 means all."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that is already in the completion. *Biased*."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token once for each time that it is already in the completion. *Biased*."""
    repetition_penalty: PositiveFloat = 1.0
    """For each token that is already in prompt or completion, divides a logit above 0 and multiplies one below 0. *Biased*."""
    logit_bias: dict[NonNegativeInt, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict[int, float])
    """Token id to the number that is added to its logit. *Biased*."""
    stop: tuple[Text, ...] = ()
    """Texts that end a completion."""
    ignore_eos: bool = False
    """Continues after an end-of-sequence token."""
    bad_words: tuple[Text, ...] = ()
    """Texts that are never sampled. *Biased*."""
    json_schema: dict[str, Any] | None = None
    """Completions are JSON of this schema. *Biased*, like all such masks. At most one of json_schema, regex, choice and grammar."""
    regex: Text | None = None
    """Completions match this regular expression. *Biased*."""
    choice: tuple[Text, ...] = ()
    """Completions are one of these texts. *Biased*."""
    grammar: Text | None = None
    """Completions follow this grammar, in EBNF. *Biased*."""
    columns: dict[OwnSetting, str] = Field(default_factory=dict[OwnSetting, str])
    """Setting to the prompt column that holds a prompt's own value: `{regex: answer_format}`. It replaces the run's value for that prompt;
    a prompt without a value uses the run's. A prompt's max_tokens must lie between the run's min_tokens and max_tokens."""

    def biased(self) -> list[str]:
        """Settings in effect that learner and reference ignore."""
        fields = SamplingConfig.model_fields
        changed = [
            each for each in _BIASED if getattr(self, each) != fields[each].get_default(call_default_factory=True)
        ]
        return changed + [f"columns.{name}" for name in self.columns if name in _BIASED]

    def not_resumable(self) -> list[str]:
        """Settings in effect that count a completion's own tokens. In a resumed request its first tokens count as prompt to the engine."""
        return [name for name in self.biased() if name not in ("min_tokens", "repetition_penalty", "logit_bias")]

    @model_validator(mode="after")
    def _refuse_contradicting_settings(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        if self.top_k == 1:
            raise ValueError(
                "top_k=1 leaves one token, of log-prob 0: there is nothing to learn; raise it, or use 0 for all tokens"
            )
        forced = [name for name in self.biased() if name.removeprefix("columns.") in STRUCTURES]
        if len(own := [name for name in forced if name in STRUCTURES]) > 1:
            raise ValueError(
                f"{' and '.join(own)} are set, and the engine takes only one of them; leave the others out"
            )
        if self.ignore_eos and forced:
            raise ValueError(f"ignore_eos=true with {forced[0]}: a complete text must end; leave one of them out")
        if self.ignore_eos and self.min_tokens and not self.stop:
            raise ValueError(
                f"min_tokens={self.min_tokens} with ignore_eos=true and without `stop`: nothing ends a completion early; leave it out"
            )
        return self


class EvaluationConfig(Section, mark=Mark.RESOURCES):
    prompts: Resources[PromptsConfig | None] = None
    """Held-out prompts, written as `prompts`, without weights and `difficulty`. A resumed run may change them; None does not evaluate."""
    num_prompts: PositiveInt = 256
    """Number of prompts, from the beginning of the source."""
    every_steps: PositiveInt | None = None
    """Steps between two evaluations. The run also evaluates before the first and after the last step; None only then."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy. All other settings are those of `sampling`."""
    num_samples: PositiveInt = 1
    """Completions of each prompt. With more than 1, pass@k is reported for k = 1, the powers of 2, and this number."""
    success_at: float = 1.0
    """A completion succeeds if its reward is at least this. `eval/accuracy` and pass@k count successes."""
    source_column: str | None = None
    """The prompt's column with its source's name. Reward and accuracy are also reported for each source."""

    @property
    def identity(self) -> str | None:
        """Short digest of prompts and temperature: evaluations of another identity are not comparable. None without prompts."""
        if self.prompts is None:
            return None
        identity = self.model_dump(mode="json", include={"prompts", "num_prompts", "temperature"})
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @model_validator(mode="after")
    def _forbid_settings_of_training_only(self) -> "EvaluationConfig":
        if self.prompts and self.prompts.difficulty:
            raise ValueError(
                "prompts.difficulty acts in training only: held-out prompts are the same at every evaluation; leave it out"
            )
        for name, source in (self.prompts.sources if self.prompts else {}).items():
            if source.weight != 1:
                raise ValueError(
                    f"prompts.sources.{name}.weight={source.weight:g} acts in training only: an evaluation takes the sources in proportion "
                    "to their sizes; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _require_samples_that_differ(self) -> "EvaluationConfig":
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0: the samples of a prompt are all the same; "
                "use num_samples=1, or raise temperature"
            )
        return self

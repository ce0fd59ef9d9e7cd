"""How completions are sampled: for training, and for evaluation."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.settings import Mark, Resources, Section

Text = Annotated[str, Field(min_length=1)]
OwnSetting = Literal["max_tokens", "json_schema", "regex", "choice", "grammar"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
STRUCTURES = ("json_schema", "regex", "choice", "grammar")
"""Settings that force what a completion is."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_BIASED = ("min_tokens", *PENALTIES, "logit_bias", "bad_words", *STRUCTURES)
"""Settings that shape what the engine draws from, and that the learner does not compute."""


class SamplingConfig(Section, mark=Mark.MATHEMATICS):
    """How completions are sampled. `rollout_logprobs` are those of the distribution that a token was drawn from, whatever shapes it.

    Learner and reference compute the same for temperature, top_k, top_p and min_p. A setting marked *biased* they leave out: their
    log-probs are of the distribution without it, and `mismatch/*` measures the difference. See "Sampling and log-probs" in
    docs/algorithms.md.
    """

    max_tokens: PositiveInt = 1024
    """Completion tokens at most."""
    min_tokens: NonNegativeInt = 0
    """Nothing ends a completion before so many tokens. *Biased* where it holds an end back."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """The learner divides logits by it too, so that log-probs mean the same on both sides. vLLM refuses more than 2, and would sample at
    0.01 for less."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the most likely tokens that have this probability together; 1 means all tokens."""
    top_k: NonNegativeInt = 0
    """Samples from so many most likely tokens; 0 means all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Samples from the tokens that are at least this times as likely as the likeliest; 0 means all."""
    presence_penalty: Penalty = 0.0
    """Taken off the logit of a token that the completion has. *Biased*."""
    frequency_penalty: Penalty = 0.0
    """Taken off the logit of a token as often as the completion has it. *Biased*."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides a logit above 0, multiplies one below, of a token that prompt or completion has. *Biased*."""
    logit_bias: dict[NonNegativeInt, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict[int, float])
    """Token id to what is added to its logit. *Biased*."""
    stop: tuple[Text, ...] = ()
    """Texts that end a completion."""
    ignore_eos: bool = False
    """Goes on after an end-of-sequence token."""
    bad_words: tuple[Text, ...] = ()
    """Texts that are never completed. *Biased*."""
    json_schema: dict[str, Any] | None = None
    """Completions are JSON of this schema. *Biased*, as all such masks are; at most one of json_schema, regex, choice and grammar."""
    regex: Text | None = None
    """Completions match this regular expression. *Biased*."""
    choice: tuple[Text, ...] = ()
    """Completions are one of these texts. *Biased*."""
    grammar: Text | None = None
    """Completions follow this grammar, in EBNF. *Biased*."""
    columns: dict[OwnSetting, str] = Field(default_factory=dict[OwnSetting, str])
    """Setting to the prompt column with a prompt's own value: `{regex: answer_format}`. It stands in place of the run's value; a
    prompt without one has the run's. A prompt's max_tokens is from the run's min_tokens to the run's max_tokens."""

    def biased(self) -> list[str]:
        """Settings in effect that learner and reference leave out."""
        fields = SamplingConfig.model_fields
        changed = [
            each for each in _BIASED if getattr(self, each) != fields[each].get_default(call_default_factory=True)
        ]
        return changed + [f"columns.{name}" for name in self.columns if name in _BIASED]

    def not_resumable(self) -> list[str]:
        """Settings in effect that count a completion's own tokens. A resumed request's first tokens are prompt to the engine."""
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
            raise ValueError(f"{' and '.join(own)} are set, and the engine takes one of them; leave the others out")
        if self.ignore_eos and forced:
            raise ValueError(f"ignore_eos=true with {forced[0]}: a complete text can only end; leave one of them out")
        if self.ignore_eos and self.min_tokens and not self.stop:
            raise ValueError(
                f"min_tokens={self.min_tokens} with ignore_eos=true and without `stop`: nothing ends a completion early; leave it out"
            )
        return self


class EvaluationConfig(Section, mark=Mark.RESOURCES):
    prompts: Resources[PromptsConfig | None] = None
    """Held-out prompts, written as `prompts`, without weights and `difficulty`. A resumed run may change them; None does not evaluate."""
    num_prompts: PositiveInt = 256
    every_steps: PositiveInt | None = None
    """None evaluates before the first and after the last step only."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy. Everything else is as `sampling` says."""
    num_samples: PositiveInt = 1
    """Completions of each prompt. More than 1 reports pass@k, for k = 1, the powers of 2, and this number."""
    success_at: float = 1.0
    """A completion is a success when its reward is this or more: what `eval/accuracy` and pass@k count."""
    source_column: str | None = None
    """Prompt column that names a prompt's source; reward and accuracy are reported for each source too."""

    @model_validator(mode="after")
    def _forbid_what_acts_in_training_alone(self) -> "EvaluationConfig":
        if self.prompts and self.prompts.difficulty:
            raise ValueError(
                "prompts.difficulty acts in training alone: held-out prompts are the same at every evaluation; leave it out"
            )
        for name, source in (self.prompts.sources if self.prompts else {}).items():
            if source.weight != 1:
                raise ValueError(
                    f"prompts.sources.{name}.weight={source.weight:g} acts in training alone: an evaluation takes the sources by their "
                    "sizes; leave it out"
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

"""The section `algorithm` of the configuration. It names the mathematics, which lies in `learner/algorithms`.

Each part is a variant by name with its own parameters; `docs/algorithms.md` lists them. A preset (`preset: dapo`) is expanded to these
settings before validation, so a validated section contains no preset.
"""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, Section


class AdaptiveKlConfig(Section, mark=Mark.MATHEMATICS):
    """The coefficient follows the measured KL towards a target (Ziegler et al., arXiv:1909.08593). Without it the coefficient is fixed."""

    target: PositiveFloat = 6.0
    """Mean KL per trajectory, in nats, towards which the coefficient steers."""
    horizon: PositiveInt = 10_000
    """Number of trajectories over which a full correction takes effect. A smaller horizon reacts faster."""


class KlTermConfig(Section, mark=Mark.MATHEMATICS):
    """Settings that all KL terms have."""

    coefficient: PositiveFloat
    """β."""
    log_ratio_clamp: PositiveFloat | None = None
    """Clamp of the log-ratio inside the estimator; None does not clamp (verl 20, OpenRLHF and TapeAgents 0.1.16: 10)."""
    refused: ClassVar[dict[str, str]] = {}
    """Estimators that do not work for this term, with the reason."""

    @field_validator("estimator", mode="before", check_fields=False)
    @classmethod
    def _say_why_it_is_refused(cls, estimator: Any) -> Any:
        if isinstance(estimator, str) and estimator in cls.refused:
            raise ValueError(f"{estimator!r} {cls.refused[estimator]}")
        return estimator


_NO_GRADIENT = "has an expected gradient of 0 on tokens of the policy itself, so it has no effect; use "


class KlLossConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL to the reference per token, added to the loss."""

    estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """k2 = d²/2 and k3 = exp(−d) + d − 1 with d = log π − log π_ref. docs/algorithms.md gives the expected gradient of each estimator."""
    adaptive: AdaptiveKlConfig | None = None
    refused: ClassVar[dict[str, str]] = {"k1": _NO_GRADIENT + "'unbiased' here, or kl.reward with estimator k1"}


class KlRewardConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL to the reference, subtracted from rewards or advantages."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Only k1 = log π − log π_ref has the gradient of the KL itself. The others are defined as in `kl.loss`."""
    adaptive: AdaptiveKlConfig | None = None
    credit: Literal["trajectory", "to_go", "token"] = "trajectory"
    """Where the KL is subtracted. `trajectory`: from the reward, before the advantage: its sum for an advantage per trajectory, token by
    token for an advantage over time. `to_go` and `token`: from the advantage of each token: β times the KL of this and all later tokens
    (OpenRLHF, LightRFT), or β times the token's own KL."""
    refused: ClassVar[dict[str, str]] = {
        "unbiased": "weighs by the current ratio, which a reward does not have; use 'k1'"
    }


class KlRolloutConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL per token to μ, the policy that sampled, added to the loss."""

    estimator: Literal["k2", "k3", "unbiased", "drift"] = "unbiased"
    """As in `kl.loss`, with μ in place of π_ref; or `drift`, CPGD's policy drift KL(μ ‖ π): exp(d) − d − 1 with d = log π − log μ."""
    refused: ClassVar[dict[str, str]] = {"k1": _NO_GRADIENT + "'unbiased' for KL(π ‖ μ), or 'drift' for KL(μ ‖ π)"}


class KlConfig(Section, mark=Mark.MATHEMATICS):
    """KL terms towards the reference model and towards the rollout policy. Each is set on its own; None leaves it out."""

    loss: KlLossConfig | None = None
    reward: KlRewardConfig | None = None
    rollout: KlRolloutConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_settings_outside_a_term(cls, values: Any) -> Any:
        given = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
        outside = [key for key in given if key not in cls.model_fields]
        if outside:
            raise ValueError(
                f"{', '.join(outside)}: a KL is one of the terms loss, reward and rollout, with settings of its own; write "
                "kl: {loss: {coefficient: 0.04, estimator: k3}}, or kl: {reward: {coefficient: 0.05, estimator: k1}}"
            )
        return cast("Any", values)


class ValueConfig(Section, mark=Mark.MATHEMATICS):
    """A critic. It predicts returns for advantages that need values (`gae`)."""

    backbone: Literal["own", "shared"] = "own"
    """`own` is a second model; `shared` is a head on the policy's hidden states."""
    path: str | None = None
    """Starting model of an own backbone: a Hugging Face folder or hub name. It must have the policy's architecture and vocabulary. The
    score of a reward model (one label, in safetensors) initialises the value head; a causal model has none, and the head starts at 0. None:
    the model from which the policy starts."""
    revision: str | None = None
    """Hub revision of `path`; None is the default branch."""
    trust_remote_code: bool = False
    """As `model.trust_remote_code`, for `path`."""
    loss: Plugin = Plugin(name="value_clip")
    """A name below learner.algorithms.losses."""
    coefficient: NonNegativeFloat = 0.1
    """Weight of the value loss relative to the policy loss (0.1 as in torchtune)."""
    aggregation: Plugin = Plugin(name="token_mean")
    """Combines the value losses of tokens into one number; a name below learner.algorithms.batch_rules.aggregation."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of an own backbone, or of the head on a shared one."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which only the critic trains (verl `critic_warmup` − 1): an own backbone, or only the head on a
    shared one. The policy's weights stay exactly as they are, and the schedule of its learning rate begins after these steps."""
    normalise_returns: bool = False
    """PopArt (arXiv:1602.07714, 1809.04474): the critic learns returns minus their running mean, divided by their running std. Whenever
    these change, the head is rescaled so that no value changes, except by the head's rounding: in bfloat16 one or two hundredths of the
    std. Advantages read values in the units of rewards; `loss` and its clip range read normalised values."""

    @model_validator(mode="after")
    def _require_an_own_backbone_for_a_path(self) -> "ValueConfig":
        if self.path is not None and self.backbone == "shared":
            raise ValueError(
                f"path={self.path!r} with backbone='shared': a head on the policy's hidden states has no backbone to load; "
                "set backbone to own, or leave path out"
            )
        for name in ("revision", "trust_remote_code"):
            if self.path is None and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} without path: the critic starts from the policy's model; "
                    f"set path, or leave {name} out"
                )
        return self


class StreamingConfig(Section, mark=Mark.MATHEMATICS):
    """Groups of one prompt across tickets, for prompts that come back in later steps and any advantage that compares the rewards of a
    group. Without it a group is the trajectories of one ticket."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Number of returns that the advantage compares: those of the prompt's trajectories in this step, filled up with its newest returns of
    earlier steps. For each prompt so far, a checkpoint's manifest holds up to group_size − 1 numbers of about 20 bytes."""
    when_full: Literal["slide", "clear"] = "slide"
    """`slide`: always compares with the newest returns. `clear`: forgets a prompt's returns once they filled a group, so groups share
    none."""


class DistillationConfig(Section, mark=Mark.MATHEMATICS):
    """A KL to the reference over its `top_k` likeliest tokens, with all other tokens as one. It is computed exactly, not estimated from the
    sampled token. It is a term of the loss, alone (`preset: on_policy_distillation_top_k`) or together with a reward."""

    coefficient: PositiveFloat = 1.0
    """Weight of this term in the loss."""
    top_k: PositiveInt = 64
    """Number of the reference's likeliest tokens at each position; the size of the vocabulary gives the full KL. Each costs 8 bytes per
    completion token in the object store and on disk, and 8 on each learner rank. Logits of a whole batch are never materialized. The
    metrics `rest` and `rest_reference` are the probability of all other tokens."""
    direction: Literal["reverse", "forward"] = "reverse"
    """`reverse`: KL(π ‖ π_ref), which drops what the teacher does not do. `forward`: KL(π_ref ‖ π), which learns all that the teacher
    does."""


class SftConfig(Section, mark=Mark.MATHEMATICS):
    """Demonstrations in addition to the trajectories. The loss of each update gets coefficient · the mean of −log π over their tokens."""

    prompts: Plugin
    """A prompt source, like `prompts`, with a column that holds the completion."""
    column: str = "completion"
    """The prompt's column that holds the demonstrated completion. The end of the turn is added to it."""
    coefficient: PositiveFloat = 1.0
    """Weight of this term in the loss."""
    batch_size: PositiveInt = 16
    """Demonstrations in one optimizer update. Every update has others, in an order that the run's seed draws for each epoch."""


class MonitorConfig(Section, mark=Mark.LAYOUT):
    """Metrics of the policy that the loss of the run does not need. The KL to the rollout policy costs nothing and is always measured."""

    entropy: PositiveInt | None = 10
    """Steps between two measurements of the entropy, beginning with the run's first step; None never. On a CPU, a measurement adds up to a
    third to the vocabulary head's time. A loss, filter or other part that needs entropies measures them at every step."""
    reference_kl: PositiveInt | None = None
    """Steps between two measurements of the KL to the reference; 1 measures every step, None never. The reference model scores the groups
    of that step, counted in start order: where groups are dropped, only a part of a step's groups may be scored. A loss with a KL to the
    reference measures it at every step."""


class AlgorithmConfig(Section, mark=Mark.MATHEMATICS):
    """The resolved mathematics of a run, as the passport records it."""

    advantage: Plugin = Plugin(name="grpo")
    """A name below learner.algorithms.advantages, or a function of yours as 'my_package.module:name'."""
    streaming: StreamingConfig | None = None
    policy_loss: Plugin = Plugin(name="ppo_clip")
    """A name below learner.algorithms.losses."""
    aggregation: Plugin = Plugin(name="token_mean")
    """Combines the losses of all tokens of an update into one number; a name below learner.algorithms.batch_rules.aggregation."""
    kl: KlConfig = KlConfig()
    entropy_coefficient: float = 0.0
    """Adds −coefficient · entropy to the loss. With 0 no entropy is computed for the loss."""
    router_aux_loss_coefficient: NonNegativeFloat = 0.0
    """For a mixture of experts: adds coefficient · E · Σ f·P over the E experts to the loss, the load-balance loss of Switch Transformers
    (arXiv:2101.03961) as transformers computes it, over all layers and all tokens of prompts and completions together. f is the share of
    tokens that chose an expert, P its mean probability; perfect balance gives the number of experts per token. f comes from the engine's
    choices over a whole update, so `rollout.routing_replay` is required."""
    reward_shaping: tuple[Plugin, ...] = ()
    """Applied to the rewards of trajectories in this order, before the advantage; names below learner.algorithms.batch_rules.shaping."""
    reward_placement: Literal["last_token", "every_token"] = "last_token"
    """The tokens that receive a trajectory's reward, for advantages over time (`gae`). torchrl and TapeAgents use every token."""
    advantage_shaping: tuple[Plugin, ...] = ()
    """Applied to the advantages in this order (whitening, clipping); names below learner.algorithms.batch_rules.shaping."""
    selection: Plugin | None = None
    """Chooses the trajectories that train from a group that `rollout.extra_trajectories` enlarged, after all were finished and judged; a
    name below learner.algorithms.batch_rules.selection. None: the first to finish train."""
    filters: tuple[Plugin, ...] = ()
    """Exclude trajectories or tokens from training. A dropped trajectory leaves the batch and its denominators (an aggregation's
    `empty_rows` may still count it); a dropped token leaves the policy loss. Names below learner.algorithms.batch_rules.filters."""
    corrections: tuple[Plugin, ...] = ()
    """Weights that correct the gap between rollout and learner. The policy loss is multiplied by them. Names below
    learner.algorithms.corrections."""
    proximal: Literal["rollout", "recompute", "approximate", "ewma"] = "rollout"
    """Source of π_old's log-probs. `rollout`: those of the sampling itself. `recompute`: the learner's at the start of the step, at the
    cost of a forward pass when a step makes several updates or another part needs them before the first; with one update the ratio is 1.
    `approximate`: log μ + (1 − 1/lag)(log π − log μ), by version lag. `ewma`: PPO-EWMA (arXiv:2110.00641), those of an exponential moving
    average of the policy's weights at the start of the step, at the cost of a forward pass and a float32 copy of the trained weights; with
    the correction `decoupled` the loss is the paper's."""
    proximal_decay: Annotated[float, Field(ge=0, lt=1)] = 0.889
    """Decay of `proximal: ewma` per optimizer update, without bias towards the first weights. The mean age of the averaged weights is
    decay/(1 − decay) updates (8 by default). With fewer trajectories per update, choose a proportionally larger age. 0 is
    `recompute`."""
    distillation: DistillationConfig | None = None
    sft: SftConfig | None = None
    monitor: MonitorConfig = MonitorConfig()
    value: ValueConfig | None = None

    @property
    def clips_around_average(self) -> bool:
        """π_old is an average of the policy's weights, which the learner keeps in addition and which never samples."""
        return self.proximal == "ewma"

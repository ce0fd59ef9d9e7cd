"""The algorithm section of the configuration. It names the mathematics, which lives in `learner/algorithms`.

Every part is a variant by name with its own parameters; `docs/algorithms.md` lists them. A preset (`preset: dapo`) is
expanded to this ordinary form before validation, so a validated section never mentions one.
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
    """Ziegler et al. (arXiv:1909.08593): the coefficient follows the measured KL towards a target."""

    target: PositiveFloat = 6.0
    """Mean KL per trajectory, in nats, that the coefficient steers to."""
    horizon: PositiveInt = 10_000
    """Trajectories over which a full correction takes effect; smaller reacts faster."""


class KlTermConfig(Section, mark=Mark.MATHEMATICS):
    """What every pull has."""

    coefficient: PositiveFloat
    """β."""
    log_ratio_clamp: PositiveFloat | None = None
    """Clamp of the log-ratio inside the estimator; None does not clamp (verl 20, OpenRLHF and TapeAgents 0.1.16: 10)."""
    refused: ClassVar[dict[str, str]] = {}
    """Estimators that do not work for this pull, and why."""

    @field_validator("estimator", mode="before", check_fields=False)
    @classmethod
    def _say_why_it_is_refused(cls, estimator: Any) -> Any:
        if isinstance(estimator, str) and estimator in cls.refused:
            raise ValueError(f"{estimator!r} {cls.refused[estimator]}")
        return estimator


_NO_GRADIENT = "has an expected gradient of 0 on tokens of the policy itself, and pulls nowhere; use "


class KlLossConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL to the reference per token, in the loss."""

    estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """docs/algorithms.md says what each one's expected gradient is. k2 = d²/2 and k3 = exp(−d) + d − 1 with d = log π − log π_ref."""
    adaptive: AdaptiveKlConfig | None = None
    """None keeps the coefficient fixed."""
    refused: ClassVar[dict[str, str]] = {"k1": _NO_GRADIENT + "'unbiased' here, or kl.reward with estimator k1"}


class KlRewardConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL to the reference, taken off what a token earns."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = log π − log π_ref is the one with the KL's own gradient; the others as in `kl.loss`."""
    adaptive: AdaptiveKlConfig | None = None
    """None keeps the coefficient fixed."""
    credit: Literal["trajectory", "to_go", "token"] = "trajectory"
    """`trajectory`: off the reward, before the advantage; its sum for an advantage per trajectory, per token for one over time. After
    the advantage: `to_go` takes β times the KL of this token and of those behind it off (OpenRLHF, LightRFT), `token` β times its own."""
    refused: ClassVar[dict[str, str]] = {
        "unbiased": "weighs by the present ratio, which a reward does not have; use 'k1'"
    }


class KlRolloutConfig(KlTermConfig, mark=Mark.MATHEMATICS):
    """β·KL to the policy that sampled, μ, per token, in the loss."""

    estimator: Literal["k2", "k3", "unbiased", "drift"] = "unbiased"
    """As in `kl.loss`, π_ref being μ; or CPGD's policy drift KL(μ ‖ π): exp(d) − d − 1 with d = log π − log μ."""
    refused: ClassVar[dict[str, str]] = {"k1": _NO_GRADIENT + "'unbiased' for KL(π ‖ μ), or 'drift' for KL(μ ‖ π)"}


class KlConfig(Section, mark=Mark.MATHEMATICS):
    """Pulls towards the reference model and towards the rollout policy, each on its own; None leaves one out."""

    loss: KlLossConfig | None = None
    """To the reference, in the loss."""
    reward: KlRewardConfig | None = None
    """To the reference, in the reward."""
    rollout: KlRolloutConfig | None = None
    """To the policy that sampled, in the loss."""

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
    """A critic: it predicts returns, for advantages that need values (`gae`)."""

    backbone: Literal["own", "shared"] = "own"
    """`own` is a second model; `shared` is a head on the policy's hidden states."""
    path: str | None = None
    """Model that an own backbone starts from: a Hugging Face folder or hub name, of a causal model or of a reward model, whose score (one
    label, in safetensors) starts the value head. It must have the policy's architecture and vocabulary. None is the model that the
    policy starts from. The head starts at 0 where there is no score."""
    revision: str | None = None
    """Hub revision of `path`; None is the default branch."""
    trust_remote_code: bool = False
    """As `model.trust_remote_code`, for `path`."""
    loss: Plugin = Plugin(name="value_clip")
    """A name below learner.algorithms.losses."""
    coefficient: NonNegativeFloat = 0.1
    """Weight of the value loss against the policy loss (0.1 as in torchtune)."""
    aggregation: Plugin = Plugin(name="token_mean")
    """How value losses of tokens become one number; a name below learner.algorithms.batch_rules.aggregation."""
    learning_rate: PositiveFloat = 1e-5
    """Of an own backbone, or of a shared backbone's head."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which the critic alone trains (verl `critic_warmup` − 1): its own backbone, or the head alone on a
    shared one. The policy's weights stay as they are, to the bit. Its learning rate's schedule begins after these steps."""
    normalise_returns: bool = False
    """PopArt (arXiv:1602.07714, 1809.04474): the critic learns returns less their running mean, over their running std, and its head is
    rescaled whenever these move, so that no value moves with them, but for the rounding of the head: in bfloat16 one or two hundredths of
    that std. Advantages read values in the rewards' own units; `loss` and its clip range see normalised ones."""

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
    """Groups by prompt, across tickets: for prompts that come back in later steps."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Returns that the advantage compares: those of the step's trajectories of a prompt, and, while these are fewer, the newest that the
    prompt earned in earlier steps. A checkpoint's manifest holds so many numbers less one, of some 20 bytes, for each prompt met so
    far."""
    when_full: Literal["slide", "clear"] = "slide"
    """`slide` always compares with the newest returns; `clear` forgets a prompt's returns once they filled a group, so that no two groups
    share one."""


class DistillationConfig(Section, mark=Mark.MATHEMATICS):
    """A KL to the reference over its `top_k` likeliest tokens and, as one, all others: computed, not estimated from the sampled token. A
    term of the loss, alone (`preset: on_policy_distillation_top_k`) or beside a reward."""

    coefficient: PositiveFloat = 1.0
    top_k: PositiveInt = 64
    """Tokens of the reference at each position; as many as the vocabulary has make it the KL over all of it. Each costs 8 bytes per
    completion token in the store and on the disk, and 8 on each rank of the learner; logits of a batch never exist. The metrics `rest`
    and `rest_reference` say how much probability the others have."""
    direction: Literal["reverse", "forward"] = "reverse"
    """`reverse`: KL(π ‖ π_ref), which leaves what the teacher does not do; `forward`: KL(π_ref ‖ π), which takes up all that it does."""


class SftConfig(Section, mark=Mark.MATHEMATICS):
    """Demonstrations beside the trajectories: each update's loss gets coefficient · the mean of −log π over their tokens."""

    prompts: Plugin
    """A prompt source, as `prompts`; a column of it holds the completion."""
    column: str = "completion"
    """The prompt's column with the demonstrated completion, to which the end of the turn is added."""
    coefficient: PositiveFloat = 1.0
    batch_size: PositiveInt = 16
    """Demonstrations in one optimizer update: others in each, in an order of every epoch that the run's seed decides."""


class MonitorConfig(Section, mark=Mark.LAYOUT):
    """Measures of the policy that no loss of the run asks for. The KL to the rollout policy costs nothing, and is always there."""

    entropy: PositiveInt | None = 10
    """Steps between two measures of the entropy, by policy version; None never measures. On a CPU one adds up to a third to the
    vocabulary head's time; a fused head is not used in such a step. A loss with entropies has them at every step."""
    reference_kl: PositiveInt | None = None
    """Steps between two measures of the KL to the reference, whose model then scores that step's groups, counted by the order in which
    groups start: where groups are dropped, a step may have a part of them. 1 measures every step; None never. A loss with a KL to the
    reference has it at every step."""


class AlgorithmConfig(Section, mark=Mark.MATHEMATICS):
    """The resolved mathematics of a run; the passport writes it down."""

    advantage: Plugin = Plugin(name="grpo")
    """A name below learner.algorithms.advantages, or a function of yours as 'my_package.module:name'."""
    streaming: StreamingConfig | None = None
    """Lets returns of earlier steps join a group, for any advantage of a group's rewards. None: a group is what one ticket sampled."""
    policy_loss: Plugin = Plugin(name="ppo_clip")
    """A name below learner.algorithms.losses."""
    aggregation: Plugin = Plugin(name="token_mean")
    """How the losses of all tokens of a step become one number; a name below learner.algorithms.batch_rules.aggregation."""
    kl: KlConfig = KlConfig()
    entropy_coefficient: float = 0.0
    """The loss gets −coefficient · entropy; 0 needs no entropies."""
    router_aux_loss_coefficient: NonNegativeFloat = 0.0
    """The loss gets coefficient · E · Σ f·P over the E experts of a mixture: the load-balance loss of Switch Transformers
    (arXiv:2101.03961) as transformers computes it, over all layers and all tokens of prompts and completions together. f is the share of
    tokens that chose an expert, P its mean probability; balance is the number of experts per token. f is of a whole update and of the
    engine's choices, so this needs `rollout.routing_replay`."""
    reward_shaping: tuple[Plugin, ...] = ()
    """Applied to the rewards of trajectories in this order, before advantages; names below learner.algorithms.batch_rules.shaping."""
    reward_placement: Literal["last_token", "every_token"] = "last_token"
    """Where a trajectory's reward lands for advantages over time (`gae`); torchrl and TapeAgents use every token."""
    advantage_shaping: tuple[Plugin, ...] = ()
    """Applied to the advantages in this order (whitening, clipping); names below learner.algorithms.batch_rules.shaping."""
    selection: Plugin | None = None
    """Of a group that `rollout.extra_trajectories` over-samples, all are finished and judged, and this chooses those that train; a name
    below learner.algorithms.batch_rules.selection. None: the first to finish."""
    filters: tuple[Plugin, ...] = ()
    """They choose what trains: a dropped trajectory leaves the batch and its denominators (an aggregation's `empty_rows` may count it),
    a dropped token the policy loss. Names below learner.algorithms.batch_rules.filters."""
    corrections: tuple[Plugin, ...] = ()
    """Weights against the gap between rollout and learner, multiplied onto the policy loss; names below learner.algorithms.corrections."""
    proximal: Literal["rollout", "recompute", "approximate", "ewma"] = "rollout"
    """The log-probs of π_old: the rollout's own; the learner's at the start of the step; log μ + (1 − 1/lag)(log π − log μ) by version
    lag; or those of PPO-EWMA (arXiv:2110.00641), an exponential moving average of the policy's weights, as it is at the start of the
    step. `recompute` costs a forward pass where a step makes several updates, or where a part needs it before the first; under one
    update the present policy is the one that begins the step, and the ratio is 1. `ewma` always costs a forward pass, and a float32
    copy of what the policy trains; the correction `decoupled` makes its loss the paper's."""
    proximal_decay: Annotated[float, Field(ge=0, lt=1)] = 0.889
    """Of `proximal: ewma`, by optimizer update, with no bias towards the first weights. The average is decay/(1 − decay) updates old (its
    centre of mass; 8 by default); updates on fewer trajectories want as many more. With 0, π_old is that of `recompute`."""
    distillation: DistillationConfig | None = None
    """None: the reference says nothing of tokens that were not sampled."""
    sft: SftConfig | None = None
    """None learns from trajectories alone."""
    monitor: MonitorConfig = MonitorConfig()
    value: ValueConfig | None = None
    """None trains no critic."""

    @property
    def clips_around_average(self) -> bool:
        """π_old is an average of the policy's weights, which the learner keeps beside them and which never acts."""
        return self.proximal == "ewma"

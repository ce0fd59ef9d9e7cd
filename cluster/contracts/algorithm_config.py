"""The algorithm section of the configuration. It names the mathematics, which lives in `learner/algorithms`.

Every part is a variant by name with its own parameters; `docs/algorithms.md` lists them. A preset (`preset: dapo`) is
expanded to this ordinary form before validation, so a validated section never mentions one.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, Section


class AdaptiveKlConfig(Section, mark=Mark.MATHEMATICS):
    """Ziegler et al. (arXiv:1909.08593): the coefficient follows the measured KL towards a target."""

    target: PositiveFloat = 6.0
    """Mean KL per trajectory, in nats, that the coefficient steers to."""
    horizon: PositiveInt = 10_000
    """Trajectories over which a full correction takes effect; smaller reacts faster."""


class KlConfig(Section, mark=Mark.MATHEMATICS):
    """Pull towards the reference model, and towards the rollout policy."""

    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """k1 = log π − log π_ref; k2 = k1²/2; k3 = exp(−k1) + k1 − 1; unbiased = sg(ρ)·k3."""
    coefficient: NonNegativeFloat = 0.0
    """β of the KL to the reference; 0 needs no reference log-probs."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds β·KL per token; `reward` subtracts it from the reward per token (its sum, for advantages of a trajectory)."""
    to_rollout_coefficient: NonNegativeFloat = 0.0
    """β of the KL to the policy that sampled, in the loss; 0 leaves it out."""
    to_rollout_estimator: Literal["k1", "k2", "k3", "unbiased", "drift"] = "k3"
    """As `estimator`, π_ref being the rollout policy μ; or CPGD's policy drift KL(μ ‖ π): exp(d) − d − 1 with d = log π − log μ."""
    log_ratio_clamp: PositiveFloat | None = None
    """Clamp of the log-ratio inside the estimators; None does not clamp (verl 20, OpenRLHF and TapeAgents 0.1.16: 10)."""
    adaptive: AdaptiveKlConfig | None = None
    """None keeps the coefficient fixed."""


class ValueConfig(Section, mark=Mark.MATHEMATICS):
    """A critic: it predicts returns, for advantages that need values (`gae`)."""

    backbone: Literal["own", "shared"] = "own"
    """`own` is a second model, initialised from the policy's weights; `shared` is a head on the policy's hidden states."""
    loss: Plugin = Plugin(name="value_clip")
    """A name below learner.algorithms.losses."""
    coefficient: NonNegativeFloat = 0.1
    """Weight of the value loss against the policy loss (0.1 as in torchtune)."""
    aggregation: Plugin = Plugin(name="token_mean")
    """How value losses of tokens become one number; a name below learner.algorithms.batch_rules.aggregation."""
    learning_rate: PositiveFloat = 1e-5
    """Of an own backbone, or of a shared backbone's head."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which the critic alone trains (verl's `critic_warmup`): its own backbone, or the head alone on a
    shared one. The policy's weights stay as they are, to the bit. Its learning rate's schedule begins after these steps."""
    whiten_returns: bool = False
    """True whitens the value targets over the batch; values then live on that scale, which moves with the batch."""


class AlgorithmConfig(Section, mark=Mark.MATHEMATICS):
    """The resolved mathematics of a run; the passport writes it down."""

    advantage: Plugin = Plugin(name="grpo")
    """A name below learner.algorithms.advantages, or a function of yours as 'my_package.module:name'."""
    policy_loss: Plugin = Plugin(name="ppo_clip")
    """A name below learner.algorithms.losses."""
    aggregation: Plugin = Plugin(name="token_mean")
    """How the losses of all tokens of a step become one number; a name below learner.algorithms.batch_rules.aggregation."""
    kl: KlConfig = KlConfig()
    entropy_coefficient: float = 0.0
    """The loss gets −coefficient · entropy; 0 needs no entropies."""
    reward_shaping: tuple[Plugin, ...] = ()
    """Applied to the rewards of trajectories in this order, before advantages; names below learner.algorithms.batch_rules.shaping."""
    reward_placement: Literal["last_token", "every_token"] = "last_token"
    """Where a trajectory's reward lands for advantages over time (`gae`); torchrl and TapeAgents use every token."""
    advantage_shaping: tuple[Plugin, ...] = ()
    """Applied to the advantages in this order (whitening, clipping); names below learner.algorithms.batch_rules.shaping."""
    filters: tuple[Plugin, ...] = ()
    """They choose what trains: a dropped trajectory leaves the batch and its denominators, a dropped token its gradient. Names below
    learner.algorithms.batch_rules.filters."""
    corrections: tuple[Plugin, ...] = ()
    """Weights against the gap between rollout and learner, multiplied onto the policy loss; names below learner.algorithms.corrections."""
    proximal: Literal["rollout", "recompute", "approximate"] = "rollout"
    """The log-probs of π_old: the rollout's own; the learner's at the start of the step; or log μ + (1 − 1/lag)(log π − log μ) by
    version lag. `recompute` costs a forward pass where a step makes several updates, or where a part needs it before the first; under
    one update the present policy is the one that begins the step, and the ratio is 1."""
    value: ValueConfig | None = None
    """None trains no critic."""

    @property
    def has_own_critic(self) -> bool:
        """True when the critic is a second model, with its memory and its optimizer's state."""
        return self.value is not None and self.value.backbone == "own"

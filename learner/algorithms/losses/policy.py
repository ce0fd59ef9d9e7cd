"""Policy losses with one ratio per token. Shapes: B rows, T tokens."""

import math
from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from learner.algorithms.conditions import LessThan
from learner.algorithms.kl import binary_kl
from learner.algorithms.losses.surrogates import Delta, DualClip, TokenLosses, clipped_surrogate, unclipped_surrogate
from learner.algorithms.masks import log_ratio, masked


def ppo_clip(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    dual_clip: DualClip | None = None,
    delta: Delta | None = None,
    log_ratio_clamp: PositiveFloat | None = None,
) -> TokenLosses:
    """Clipped surrogate of PPO and GRPO.

    Formula: −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A); `dual_clip` c: for A < 0 not above −cA; `delta` δ: the unclipped ρ is at most δ
    Gradient: −ρA∇log π for tokens that no bound holds, 0 for the others
    Source: PPO, arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729; two-sided bound INTELLECT-2, arXiv:2505.07291
    Degenerate: A = 0 gives 0 for any ratio; at ρ = 1 the gradient is the policy gradient −A∇log π
    Peers: torchrl ClipPPO/GRPO, torchtune PPOLoss (ε 0.1), TapeAgents `grpo`, TRL (delta), DAPO (0.2/0.28); verl `vanilla` is
        dual_clip 3.0 and log_ratio_clamp 20; OpenRLHF log_ratio_clamp 20
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return clipped_surrogate(
        ratio_BT,
        advantages_BT=masked(advantages_BT, mask_BT=loss_mask_BT),
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        dual_clip=dual_clip,
        delta=delta,
    )


def reinforce(
    policy_logprobs_BT: Tensor, *, advantages_BT: Tensor, loss_mask_BT: Tensor, positive_part: bool = False
) -> Tensor:
    """Plain policy gradient, with neither ratio nor clip.

    Formula: −log π · A; `positive_part` takes max(A, 0)
    Gradient: the policy gradient for tokens that π itself sampled; older tokens are not corrected for
    Source: Williams (1992); GPG, arXiv:2504.02546
    Degenerate: none
    Peers: TapeAgents `reinforce` (`relu_log_p_weights` is positive_part; `use_advantages=False` is advantage `raw_reward`), verl `gpg`
    """
    weights_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    weights_BT = weights_BT.clamp(min=0) if positive_part else weights_BT
    return -masked(policy_logprobs_BT, mask_BT=loss_mask_BT) * weights_BT


def importance_sampling(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """Unclipped surrogate.

    Formula: −ρA
    Gradient: −ρA∇log π: exact for a token given the tokens before it, whose distribution stays the sampler's
    Source: conservative policy iteration, Kakade & Langford (2002)
    Degenerate: unbounded; a clamp on the log-ratio bounds it
    Peers: TapeAgents `grpo` with a wide epsilon; tinker `importance_sampling`
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return unclipped_surrogate(ratio_BT, advantages_BT=masked(advantages_BT, mask_BT=loss_mask_BT))


def clipped_ratio(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
) -> TokenLosses:
    """The ratio clipped without PPO's minimum: tokens outside the range get no gradient on either side.

    Formula: −clip(ρ, 1−ε_low, 1+ε_high)·A
    Gradient: −ρA∇log π inside the range, 0 outside, for either sign of A
    Source: torchrl 0.14.1, which calls it CISPO; the published CISPO keeps the gradient of tokens outside (see `cispo`)
    Degenerate: none
    Peers: torchrl `CISPOLoss`
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    low, high = math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf, math.log1p(epsilon_high)
    losses_BT = -masked(advantages_BT, mask_BT=loss_mask_BT) * ratio_BT.clamp(low, high).exp()
    return TokenLosses(losses_BT, clipped_low_BT=ratio_BT < low, clipped_high_BT=ratio_BT > high)


def cispo(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_max: PositiveFloat = 5.0,
    epsilon_min: Annotated[NonNegativeFloat, LessThan("epsilon_max")] = 0.0,
    log_ratio_clamp: PositiveFloat | None = None,
) -> TokenLosses:
    """REINFORCE with a truncated, detached ratio: no token loses its gradient.

    Formula: −sg(clip(ρ, ε_min, ε_max))·A·log π; both bounds are absolute
    Gradient: −clip(ρ, ε_min, ε_max)·A∇log π for every token
    Source: MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786 (ε_max 5)
    Degenerate: none
    Peers: TRL `cispo` (epsilon_high is ε_max), verl `cispo` (ε_min 1−low, ε_max 1+high, log_ratio_clamp 20); torchrl's is `clipped_ratio`
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    ratio_BT = ratio_BT.detach().exp()
    weights_BT = ratio_BT.clamp(epsilon_min, epsilon_max) * masked(advantages_BT, mask_BT=loss_mask_BT)
    losses_BT = -weights_BT * masked(policy_logprobs_BT, mask_BT=loss_mask_BT)
    return TokenLosses(losses_BT, clipped_low_BT=ratio_BT < epsilon_min, clipped_high_BT=ratio_BT > epsilon_max)


def cpgd(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    offset: Literal["none", "old_logprob"] = "none",
) -> TokenLosses:
    """Clipped policy gradient with the log-ratio instead of the ratio. Its drift term is `kl.rollout` with estimator `drift`.

    Formula: −min(log ρ·A, clip(log ρ, log(1−ε_low), log(1+ε_high))·A)
    Gradient: −A∇log π, not weighted by the ratio, for tokens that no bound holds
    Source: CPGD, arXiv:2505.12504
    Degenerate: `offset="old_logprob"` adds log π_old to both terms: another value, the same gradient
    Peers: LightRFT `use_cpg_loss` (one ε for both sides, offset old_logprob)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    low, high = math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf, math.log1p(epsilon_high)
    is_positive_BT = advantages_BT >= 0
    bounded_BT = torch.where(is_positive_BT, ratio_BT.clamp(max=high), ratio_BT.clamp(min=low))
    if offset == "old_logprob":
        bounded_BT = bounded_BT + masked(proximal_logprobs_BT, mask_BT=loss_mask_BT)
    return TokenLosses(
        -bounded_BT * advantages_BT,
        clipped_low_BT=(ratio_BT < low) & (advantages_BT < 0),
        clipped_high_BT=(ratio_BT > high) & (advantages_BT > 0),
    )


def sapo(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    tau_positive: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """A soft gate instead of a hard clip.

    Formula: −(4/τ)·σ(τ(ρ − 1))·A, τ by the sign of A
    Gradient: −4σ(x)(1 − σ(x))·ρA∇log π with x = τ(ρ − 1): the policy gradient at ρ = 1, fading on both sides
    Source: SAPO, arXiv:2511.20347
    Degenerate: the gate saturates, so an extreme ratio has no gradient
    Peers: TRL, AReaL and SkyRL `sapo`, verl `sapo` (log_ratio_clamp 20, always aggregated as a sequence mean)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    tau_BT = torch.full_like(advantages_BT, tau_negative).masked_fill_(advantages_BT > 0, tau_positive)
    # The gate is 1 to the last bit long before exp(60); beyond it 0·inf would make its gradient NaN.
    ratio_BT = ratio_BT if log_ratio_clamp is not None and log_ratio_clamp < 60 else ratio_BT.clamp(max=60.0)
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT.exp() - 1))
    return gate_BT * (advantages_BT / tau_BT * -4)


def dppo(
    policy_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    divergence: Literal["tv", "kl"] = "tv",
    threshold_low: NonNegativeFloat = 0.2,
    threshold_high: NonNegativeFloat = 0.2,
    ratio_cap: PositiveFloat | None = None,
    log_ratio_clamp: PositiveFloat | None = None,
    score_function: bool = False,
) -> TokenLosses:
    """A trust region on probabilities: tokens whose probability already moved too far in the direction of A get no gradient.

    Formula: −1[inside]·ρA with ρ = π/μ; inside unless D > threshold and (π − μ) has A's sign; D = |π − μ| (`tv`) or KL(μ ‖ π)
        of drawing the token or not (`kl`); `ratio_cap` bounds ρ; `score_function` takes sg(ρ)·log π for ρ
    Gradient: −ρA∇log π for tokens inside, 0 for the others
    Source: arXiv:2602.04879
    Degenerate: a rare token may have any ratio, as |π − μ| stays small: this is intended. ρ already weighs back to μ: a correction by
        π_old/μ (`tis`, `decoupled`, `icepop`) multiplies by that ratio once more
    Peers: verl `dppo_tv`, `dppo_kl` (ratio_cap is clip_ratio_c, score_function, log_ratio_clamp 20), SkyRL `dppo`; prime-rl's default is
        `tv` with `kl.rollout`, estimator k2
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    policy_BT = masked(policy_logprobs_BT, mask_BT=loss_mask_BT)
    rollout_BT = masked(rollout_logprobs_BT, mask_BT=loss_mask_BT)
    with torch.no_grad():
        moved_BT = policy_BT.exp() - rollout_BT.exp()
        distance_BT = moved_BT.abs()
        if divergence == "kl":
            # Rounding can lift the log-prob of a certain token above 0: its KL would be NaN, and the token would lose its gradient.
            distance_BT = binary_kl(rollout_BT.clamp(max=0.0), to_logprobs_BT=policy_BT.clamp(max=0.0))
        too_high_BT = (advantages_BT > 0) & (moved_BT > 0) & ~(distance_BT <= threshold_high)
        too_low_BT = (advantages_BT <= 0) & (moved_BT < 0) & ~(distance_BT <= threshold_low)
        outside_BT = too_high_BT | too_low_BT
    ratio_BT = torch.where(outside_BT | (advantages_BT == 0), torch.zeros_like(ratio_BT), ratio_BT)
    cap = math.inf if ratio_cap is None else math.log(ratio_cap)
    if score_function:
        surrogate_BT = ratio_BT.detach().clamp(max=cap).exp() * policy_BT
    else:
        surrogate_BT = ratio_BT.clamp(max=cap).exp()
    losses_BT = torch.where(outside_BT, torch.zeros_like(surrogate_BT), -advantages_BT * surrogate_BT)
    return TokenLosses(
        losses_BT, clipped_low_BT=too_low_BT, clipped_high_BT=too_high_BT, clipped_dual_BT=ratio_BT > cap
    )


def dro(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    beta: NonNegativeFloat = 1.0,
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """Policy gradient with a quadratic penalty on the log-ratio to the old policy.

    Formula: −log π · A + ½β(log ρ)²
    Gradient: (β log ρ − A)∇log π: 0 where log ρ = A/β, the optimum of the KL-regularised reward
    Source: DRO, arXiv:2405.19107
    Degenerate: none
    Peers: verl `dro` (log_ratio_clamp 20), ROLL `kimi15` (β 0.1)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    losses_BT = reinforce(policy_logprobs_BT, advantages_BT=advantages_BT, loss_mask_BT=loss_mask_BT)
    return losses_BT + 0.5 * beta * ratio_BT.square()

"""Statistics of a step. Merged over micro-batches and ranks, they do not depend on the layout.

Each quantity keeps count, sum, sum of squares, minimum and maximum in float64; `compute()` turns the merged ones into reported numbers.
Nothing is read back from a device before `compute()`. Names are stable: `QUANTITIES` documents them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from learner.algorithms.placing import placed

QUANTITIES: dict[str, tuple[tuple[str, ...], str]] = {
    "loss": (("per_update",), "The sum of the losses below. While a critic warms up, only `value_loss` trains."),
    "policy_loss": (("per_update",), "Policy loss after corrections and aggregation."),
    "kl_loss": (("per_update",), "`kl.loss`: coefficient times KL to the reference, aggregated."),
    "kl_rollout_loss": (("per_update",), "`kl.rollout`: coefficient times KL to the rollout policy, aggregated."),
    "distillation_loss": (("per_update",), "`algorithm.distillation`: coefficient times its KL, aggregated."),
    "entropy_loss": (("per_update",), "Minus coefficient times entropy, aggregated."),
    "value_loss": (("per_update",), "Coefficient times value loss, aggregated."),
    "sft_loss": (("per_update",), "`algorithm.sft`: minus coefficient times the mean log π of demonstrated tokens."),
    "router_aux_loss": (("per_update",), "`router_aux_loss_coefficient` times the load-balance loss of the experts."),
    "demonstration_logprob": (("mean", "min"), "log π of the demonstrations' tokens."),
    "clip_fraction": (
        ("share",),
        "Share of tokens whose loss the lower or the upper bound changed, or that `clip_cov` dropped. Ratios out of range that PPO's "
        "minimum ignores do not count, nor do the tokens of `clip_fraction_dual`.",
    ),
    "clip_fraction_low": (
        ("share",),
        "Share of tokens clipped by the lower bound; under PPO's minimum only where A < 0.",
    ),
    "clip_fraction_high": (
        ("share",),
        "Share of tokens clipped by the upper bound; under PPO's minimum only where A > 0.",
    ),
    "clip_fraction_dual": (("share",), "Share of tokens clipped by dual_clip, delta or a cap on weights."),
    "clip_fraction_covariance": (("share",), "`clip_cov`: share of tokens dropped by covariance and not by a bound."),
    "ratio_outside": (("share",), "Share of tokens whose ratio π/π_old is outside 0.8 to 1.2, for any advantage."),
    "ratio": (("mean", "min", "max"), "π/π_old."),
    "surrogate": (("mean",), "π/π_old · A, before any bound."),
    "bounded_surrogate": (("mean",), "Minus the policy loss per token, before corrections."),
    "ratio_reference": (("mean", "max"), "π_ref/π."),
    "ratio_reference_old": (("mean", "max"), "π_ref/π_old."),
    "kl_old_k1": (("mean", "min", "max"), "log π_old − log π."),
    "kl_old_k3": (("mean", "min", "max"), "ρ − 1 − log ρ with ρ = π/π_old: KL(π_old ‖ π)."),
    "kl_step_k3": (
        ("mean", "max"),
        "As `kl_old_k3`, but to the policy at the start of the step, for any π_old; only with `stop_at_kl` or `target_kl`. That of the "
        "update that `stop_at_kl` stops is only in `updates/kl_step_k3_mean/<number>`.",
    ),
    "kl_rollout_k1": (("mean", "min", "max"), "log μ − log π."),
    "kl_rollout_k3": (("mean", "min", "max"), "π/μ − 1 − log π/μ: KL(μ ‖ π)."),
    "kl_reference_k1": (("mean", "min", "max"), "log π − log π_ref."),
    "kl_reference_k3": (("mean", "min", "max"), "π_ref/π − 1 − log π_ref/π: KL(π ‖ π_ref)."),
    "kl_reference_per_trajectory": (("mean",), "Sum over a trajectory of log π − log π_ref; an adaptive β steers it."),
    "distillation_kl": (
        ("mean", "max"),
        "KL of `algorithm.distillation`, in its direction. All tokens but the reference's `top_k` likeliest count as one.",
    ),
    "rest": (("mean",), "The policy's probability of all tokens but the reference's `distillation.top_k` likeliest."),
    "rest_reference": (("mean",), "The reference's own probability of these tokens."),
    "mismatch": (("mean", "max"), "|log π − log μ| in nats, over the tokens of `mismatch/mean_abs_nats`."),
    "mismatch_off_policy_steps": (
        ("min",),
        "Off-policy steps of those tokens. Above 0 the mismatch includes the policy's own change in these steps.",
    ),
    "routing_differs": (
        ("share",),
        "`rollout.routing_replay`: share of the engine's choices of experts that the learner's routers would not make.",
    ),
    "importance_weight": (
        ("mean", "min", "max", "ess"),
        "π/μ; `ess`: effective sample size, as a share: (Σw)²/(n·Σw²).",
    ),
    "trajectory_weight": (
        ("mean", "max", "ess"),
        "Product of π/μ over a trajectory, its logarithm clamped to ±100; `ess` as a share of the trajectories.",
    ),
    "correction_weight": (("mean", "min", "max"), "Product of the configured corrections."),
    "correction_dropped": (("share",), "Share of tokens that a correction dropped."),
    "filtered_tokens": (("share",), "Share of tokens whose policy loss a filter left out."),
    "entropy": (
        ("mean", "min", "max"),
        "Entropy of the policy per token, in nats; every `algorithm.monitor.entropy` steps, or always if the algorithm needs it.",
    ),
    "policy_logprob": (("mean", "max"), "log π of the sampled tokens."),
    "policy_logprob_positive": (("mean",), "The same, over tokens with A > 0."),
    "policy_logprob_negative": (("mean",), "The same, over tokens with A < 0."),
    "rollout_logprob": (("mean",), "log μ of the sampled tokens."),
    "reference_logprob": (("mean",), "log π_ref of the sampled tokens."),
    "reward": (("mean", "std", "min", "max"), "Reward per trajectory as judged, before shaping."),
    "shaped_reward": (("mean", "std", "min", "max"), "Reward per trajectory after shaping."),
    "trajectory_return": (
        ("mean", "std", "min", "max"),
        "Return of a trajectory: the sum of its shaped rewards per token, less the KL of `kl.reward` with credit `trajectory`.",
    ),
    "advantage": (("mean", "std", "min", "max"), "Advantage per token."),
    "return": (("mean", "std"), "Return per token."),
    "value": (("mean", "min", "max"), "Value per token."),
    "value_clip_fraction": (("share",), "Share of tokens whose value loss the clip range changed."),
    "value_error": (("mean", "std"), "Return minus old value; with `return` it gives `explained_variance`."),
    "completion_length": (("mean", "min", "max"), "Completion tokens per trajectory, masked ones included."),
    "prompt_length": (
        ("mean", "max"),
        "Prompt tokens per trajectory: of several segments, those of the first one's prompt.",
    ),
    "length": (("mean", "max"), "The same and the completion tokens of all segments."),
    "truncated": (("share",), "Share of trajectories that were truncated."),
    "off_policy_steps": (("mean", "max"), "Learner version minus the version that sampled the token."),
    "groups": (("total",), "Groups of the step."),
    "groups_without_variance": (("total",), "Groups whose shaped rewards are all equal."),
    "trajectories": (("total",), "Trajectories of the step."),
    "trajectories_filtered": (("total",), "Trajectories that filters took out."),
    "tokens": (("total",), "Unmasked completion tokens of the step, filtered ones included."),
}
"""Quantity to its reported outputs and its meaning.

A total, a share or a mean over updates has the quantity's own name; others add theirs: `reward_std`.
"""

DERIVED = {"explained_variance": "1 − var(return − old value)/var(return); absent if returns vary by rounding only."}
OF_THE_LEARNER = {
    "gradient_norm": "Global L2 norm before clipping, of the policy and of a critic on its backbone; mean over the step's updates.",
    "gradient_norm_max": "The same; maximum over the step's updates.",
    "critic_gradient_norm": "As `gradient_norm`, of a critic with its own backbone, which is clipped separately.",
    "critic_gradient_norm_max": "The same; maximum over the step's updates.",
    "learning_rate": "The policy's in the step's updates; 0 when none was made, and while a critic warms up.",
    "updates": "Optimizer updates made in the step.",
    "skipped": "Updates not made because loss or gradient were not finite.",
    "empty_updates": "Updates not made because filters and corrections left no token to train on.",
    "stopped_at_kl": "1 if the policy moved beyond `learner.stop_at_kl`: the rest of the step's updates were not made.",
    "kl_loss_coefficient": "Present β of `kl.loss`.",
    "kl_reward_coefficient": "Present β of `kl.reward`.",
    "kl_rollout_coefficient": "β of `kl.rollout`.",
}
_ROW = {name: row for row, name in enumerate(QUANTITIES)}
_EMPTY = (0.0, 0.0, 0.0, torch.inf, -torch.inf)
_ROUNDING = 1e-7
"""Smaller differences, relative to the largest number, are rounding: sums of squares do not resolve them."""
_MOST_AT_ONCE = 2**21
"""Numbers that wait to be reduced together: 16 MiB."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """All quantities of some rows. `merge` joins disjoint rows; order and split matter only by float64 rounding."""

    moments_Q5: Tensor
    """float64; columns are count, sum, sum of squares, minimum, maximum. Gathered across ranks, then merged."""

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Self:
        return cls(placed([_EMPTY] * len(QUANTITIES), device, dtype=torch.float64))

    @classmethod
    def merge(cls, parts: "Sequence[Statistics]") -> "Statistics":
        if not parts:
            return cls.empty()
        stacked = torch.stack([part.moments_Q5 for part in parts])
        sums, least, most = stacked[..., :3].sum(0), stacked[..., 3:4].amin(0), stacked[..., 4:5].amax(0)
        return cls(torch.cat([sums, least, most], 1))

    def compute(self, *, num_updates: int = 1) -> dict[str, float]:
        """The reported numbers, losses as a mean over `num_updates`. A quantity without records is absent."""
        rows = dict(zip(QUANTITIES, self.moments_Q5.tolist(), strict=True))
        report = {
            reported_name(name, output): _output(rows[name], output, num_updates)
            for name, (outputs, _) in QUANTITIES.items()
            if rows[name][0]
            for output in outputs
        }
        returns, errors = rows["return"], rows["value_error"]
        # Returns are advantages plus values: equal ones differ by the rounding of the values.
        scale = max(map(abs, (*returns[3:], *errors[3:])))
        if errors[0] and returns[4] - returns[3] > _ROUNDING * scale and _variance(returns) > 0:
            report["explained_variance"] = 1 - _variance(errors) / _variance(returns)
        return report


class Recorder:
    """Collects the quantities of one micro-batch. Small ones of equal shape are reduced together."""

    def __init__(self, device: torch.device) -> None:
        self._moments_Q5 = Statistics.empty(device).moments_Q5
        self._waiting: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}

    def record(self, name: str, x: Tensor, where: Tensor | None = None) -> None:
        """Records all entries of x, or those where the mask is true. x must not change afterwards."""
        if not x.numel():
            return
        where = torch.ones_like(x, dtype=torch.bool) if where is None else where
        waiting = self._waiting.setdefault(x.shape, [])
        waiting.append((_ROW[name], x.detach().double(), where))
        if len(waiting) * x.numel() > _MOST_AT_ONCE:
            self._reduce(self._waiting.pop(x.shape))

    def share(self, name: str, x: Tensor, *, counts: Tensor) -> None:
        """Records entries of x that count several times each, for a quantity of which only the share is reported."""
        x, counts = x.detach().double(), counts.double()
        self._moments_Q5[_ROW[name], :2] = torch.stack([counts.sum(), (x * counts).sum()])

    def total(self, name: str, value: Tensor) -> None:
        """Records one number, which adds up over micro-batches."""
        self.record(name, value.detach().reshape(1))

    def statistics(self) -> Statistics:
        for waiting in self._waiting.values():
            self._reduce(waiting)
        self._waiting.clear()
        return Statistics(self._moments_Q5)

    def _reduce(self, waiting: list[tuple[int, Tensor, Tensor]]) -> None:
        rows, xs, masks = zip(*waiting, strict=True)
        x, where = torch.stack(xs).flatten(1), torch.stack(masks).flatten(1)
        kept = torch.where(where, x, 0)
        least, most = torch.where(where, x, torch.inf).amin(1), torch.where(where, x, -torch.inf).amax(1)
        moments = (where.sum(1).double(), kept.sum(1), kept.square().sum(1), least, most)
        self._moments_Q5[placed(rows, x.device)] = torch.stack(moments, 1)


def reported_name(name: str, output: str) -> str:
    """Name of one output of a quantity."""
    return name if output in ("total", "per_update", "share") else f"{name}_{output}"


def _output(row: list[float], output: str, num_updates: int) -> float:
    count, total, squares, least, most = row
    if output == "ess":
        return total * total / (count * squares) if squares else 0.0
    values = {
        "total": total,
        "per_update": total / num_updates,
        "share": total / count,
        "mean": total / count,
        "std": _variance(row) ** 0.5,
        "min": least,
        "max": most,
    }
    return values[output]


def _variance(row: list[float]) -> float:
    """With ddof 0; exactly 0 for values that are equal up to rounding."""
    count, total, squares, least, most = row
    if not count or most - least < _ROUNDING * max(abs(least), abs(most)):
        return 0.0
    # A product, since Python's power raises on overflow, and the step is already learned.
    return max(squares / count - (total / count) * (total / count), 0.0)


def reported_names() -> dict[str, str]:
    """Every name that `compute` may report, with its meaning."""
    names = {reported_name(name, output): text for name, (outputs, text) in QUANTITIES.items() for output in outputs}
    return names | DERIVED | OF_THE_LEARNER

"""Which runs there are, how each differs from the quickstart, and which metrics its picture shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

QUICKSTART = "deploy/runs/quickstart.yaml"
COMMON = ("num_steps=30", "evaluation.every_steps=10", "algorithm.monitor.entropy=1")
"""Settings of all runs: short, and measured often."""
NUMBERS = Path(__file__).with_name("numbers")
PICTURES = Path(__file__).parents[2] / "docs" / "pictures" / "runs"
STANDS_FOR = {"reward/right": "reward/mean"}
"""A metric of one run to that of the others which says the same: rightness is all that their judge pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    settings: tuple[str, ...] = ()
    """Beyond `COMMON`, as on the command line."""
    shown: tuple[str, ...]
    """Metrics, one panel each."""
    compared: tuple[str, ...] = ("healthy",)
    """Runs whose lines are drawn thin behind its own."""


_STALE = (
    "num_steps=20",
    "reward.judge={name: tests.pictures.judges:slow, seconds: 20}",
    "reward.max_concurrency=8192",
    "buffer.max_off_policy_steps=8",
    "algorithm.proximal=recompute",
)
_AGE = ("eval/accuracy", "staleness/mean", "learner/kl_rollout_k3_mean")
RUNS: Mapping[str, Run] = {
    "healthy": Run(
        shown=(
            "reward/mean",
            "eval/accuracy",
            "learner/groups_without_variance",
            "learner/entropy_mean",
            "learner/kl_reference_k3_mean",
            "learner/gradient_norm",
        ),
        compared=(),
    ),
    "rate_too_high": Run(
        settings=("optimizer.learning_rate=1e-2",),
        shown=("reward/mean", "learner/kl_reference_k3_mean", "tokens/truncated_share"),
    ),
    "rate_too_low": Run(
        settings=("optimizer.learning_rate=5e-6",),
        shown=("reward/mean", "learner/kl_reference_k3_mean", "learner/gradient_norm"),
    ),
    "too_hard": Run(
        settings=("prompts.min_digits=4", "prompts.max_digits=4"),
        shown=("reward/mean", "learner/groups_without_variance", "learner/gradient_norm"),
    ),
    "truncated": Run(
        settings=("sampling.max_tokens=2",),
        shown=("reward/mean", "tokens/truncated_share", "eval/accuracy"),
    ),
    "mismatch": Run(
        settings=("sampling.repetition_penalty=1.5",),
        shown=("reward/mean", "mismatch/mean_abs_nats", "learner/clip_fraction"),
    ),
    "hacking": Run(
        settings=(
            "reward.judge=exact_match",
            "reward.parts={right: {judge: reasoning_gym}, long: {judge: {name: length, at_least: 4, at_most: 6}, weight: 2}}",
        ),
        shown=("reward/long", "reward/right", "tokens/completion_mean"),
    ),
    "stale": Run(settings=_STALE, shown=_AGE),
    "corrected": Run(
        settings=(*_STALE, "algorithm.corrections=[decoupled]"), shown=_AGE, compared=("healthy", "stale")
    ),
}

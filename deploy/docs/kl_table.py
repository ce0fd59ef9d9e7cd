"""The table of KL terms in docs/algorithms.md: what each one's value and gradient are in expectation. A test enumerates every row."""

from typing import NamedTuple


class KlRow(NamedTuple):
    """Under samples of π itself (on-policy) and of another policy μ. "other" is the reference, and μ for `rollout`."""

    place: str
    estimator: str
    value_on_policy: str
    gradient_on_policy: str
    value_off_policy: str
    gradient_off_policy: str
    """A divergence means its gradient; "biased": none of those named."""


_RIGHT, _REVERSE, _BIASED = "KL(π ‖ other)", "KL(other ‖ π)", "biased"
ROWS = (
    KlRow("loss", "k2", _BIASED, _RIGHT, _BIASED, _BIASED),
    KlRow("loss", "k3", _RIGHT, _REVERSE, _BIASED, _BIASED),
    KlRow("loss", "unbiased", _RIGHT, _RIGHT, _RIGHT, _RIGHT),
    KlRow("reward", "k1", _RIGHT, _RIGHT, _BIASED, f"{_RIGHT} − KL(π ‖ μ)"),
    KlRow("reward", "k2", _BIASED, _BIASED, _BIASED, _BIASED),
    KlRow("reward", "k3", _RIGHT, f"{_RIGHT} − {_REVERSE}", _BIASED, _BIASED),
    KlRow("rollout", "k2", "0", "0", _BIASED, _BIASED),
    KlRow("rollout", "k3", "0", "0", _BIASED, _BIASED),
    KlRow("rollout", "unbiased", "0", "0", _RIGHT, _RIGHT),
    KlRow("rollout", "drift", "0", "0", _REVERSE, _REVERSE),
)


def table() -> str:
    """As Markdown."""
    lines = [
        "In expectation over the tokens, with the contexts held fixed; on-policy means that π itself sampled. `other` is the",
        "reference, and μ for `kl.rollout`. A gradient is that of the divergence named. `kl.reward` with credit `trajectory` or",
        "`to_go` also has the gradient through the contexts that later tokens meet; `token` and all terms of the loss leave it out.",
        "",
        "| term | estimator | value, on-policy | gradient, on-policy | value, sampled by μ | gradient, sampled by μ |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| `kl.{place}` | `{estimator}` | {' | '.join(claims)} |" for place, estimator, *claims in ROWS]
    )

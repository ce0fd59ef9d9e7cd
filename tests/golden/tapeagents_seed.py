"""TapeAgents 0.1.0, the version treadwheel set out from: a token mean over the batch, and no clamps."""

from typing import Any

from tests.golden import tapeagents
from tests.golden.cases import Unsupported, Variant


def masked_mean(v: Variant) -> dict[str, Any]:
    """0.1.0 multiplies by the mask: a NaN shows wherever it stands."""
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: TapeAgents gives NaN, we give 0")
    if tapeagents.has_nan(v) and not v.mask()[0, 0]:
        raise Unsupported("a masked NaN: TapeAgents 0.1.0 multiplies by the mask and gives NaN, ours does not touch it")
    return tapeagents.means(tapeagents.entropy_of(v), v.mask())


ADAPTERS = tapeagents.ADAPTERS | {
    "rl_step": tapeagents.rl_step(default_aggregation="token_mean", clamp=None),
    "masked_mean": masked_mean,
    "calculate_reward_with_implicit_kl": tapeagents.implicit_kl,
}

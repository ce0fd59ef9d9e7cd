"""TapeAgents 0.1.0, the version treadwheel set out from: a token mean over the batch, and no clamps."""

from typing import Any

from tests.golden import tapeagents
from tests.golden.cases import Unsupported, Variant


def masked_mean(v: Variant) -> dict[str, Any]:
    if "nan" in v.name and not v.mask()[0, 0]:
        raise Unsupported("a masked NaN: TapeAgents 0.1.0 multiplies by the mask and gives NaN, ours does not touch it")
    if "nan" in v.name and v.mask().any(1).all():
        entropy = v["entropy"].clone()
        entropy[0, 0] = float("nan")
        return tapeagents.means(entropy, v.mask())
    return tapeagents.masked_mean(v)


ADAPTERS = tapeagents.ADAPTERS | {
    "tapeagents.finetune.rl.rl_step": tapeagents.rl_step(default_aggregation="token_mean", clamp=None),
    "masked_mean": masked_mean,
    "calculate_reward_with_implicit_kl": tapeagents.implicit_kl,
}

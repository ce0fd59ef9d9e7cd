"""torchrl at commit 77dbc6c9f, the version treadwheel set out from.

Its mask is `old log-prob is not 0`, its means run over all positions, its clip range is always 0.2 and its MCAdvantage never empties.
Cases that an option of ours reproduces are compared; the others are unsupported.
"""

from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.batch_rules import aggregation
from learner.algorithms.losses.policy import ppo_clip
from tests.golden import logprobs, peer_parts, torchrl
from tests.golden.cases import Uncompared, Unsupported, Variant


def grpo_loss(v: Variant) -> dict[str, Any]:
    """The clip range that is configured never arrives: it is 0.2."""
    v.without_effect("clip_epsilon", "entropy_coeff")
    mask = v["old_log_probs"] != 0
    policy_BT = logprobs.token_logprobs(v["logits"], token_ids_BT=v["tokens"])
    old_BT, advantages_BT = v["old_log_probs"], v["advantage"].squeeze(-1)
    policy_kept = masks.masked(policy_BT, mask_BT=mask)
    everywhere = torch.ones_like(mask)
    ratio = masks.log_ratio(policy_kept, over_BT=old_BT, mask_BT=everywhere)
    token = ppo_clip(policy_kept, proximal_logprobs_BT=old_BT, advantages_BT=advantages_BT, loss_mask_BT=everywhere)
    result: dict[str, Any] = {
        "loss_objective": _reduce(token.losses_BT, v),
        "clip_fraction": ((ratio.exp() < 0.8) | (ratio.exp() > 1.2)).to(ratio.dtype).mean(),
        "kl_approx": -ratio.mean(),
        "ESS": Uncompared("over the rows of each column, padding included; ours is over tokens"),
    }
    if v.option("entropy_bonus", True):
        entropy_BT = logprobs.entropies(v["logits"])
        result |= {
            "entropy": entropy_BT.mean(),
            "loss_entropy": -v.option("entropy_coeff", 0.01) * _reduce(entropy_BT, v),
        }
    for name, other, coefficient in (
        ("ref", v["ref_log_probs"], v.option("kl_to_ref_coeff")),
        ("inference", old_BT, v.option("kl_to_inference_coeff")),
    ):
        if coefficient is not None and not mask.any():
            raise Unsupported("the mean of nothing: torchrl gave NaN, we give 0")
        if coefficient is not None:
            estimate = masks.masked_mean(kl.k3(policy_BT, other_logprobs_BT=other, loss_mask_BT=mask), mask_BT=mask)
            result |= {f"kl_to_{name}": estimate, f"loss_kl_to_{name}": coefficient * estimate}
    return result | {"total": sum(value.sum() for name, value in result.items() if name.startswith("loss_"))}


def _reduce(x_BT: Tensor, v: Variant) -> Tensor:
    everywhere = torch.ones_like(x_BT, dtype=torch.bool)
    kind = v.only("reduction", "mean", "sum", "none")
    if kind == "none":
        return peer_parts.none(x_BT, loss_mask_NT=everywhere)
    weights = aggregation.sum(everywhere) if kind == "sum" else aggregation.token_mean(everywhere)
    return aggregation.aggregate(x_BT, weights_BT=weights)


def kl_reward(v: Variant) -> dict[str, Any]:
    """No prompt is masked."""
    lengths = v["lengths"].tolist()
    found = torchrl.kl_of_rows(v, [0] * len(lengths), v.option("coef"))
    reward = {"reward": found["reward"], "reward.row_lengths": found["reward.row_lengths"]}
    if not v.option("add_to_reward"):
        reward = {"reward": v["reward"].flatten(), "reward.row_lengths": torch.ones(len(lengths), dtype=torch.long)}
    return reward | {
        "kl_penalty": found["kl_penalty"],
        "kl_penalty.row_lengths": found["kl_penalty.row_lengths"],
        "ref_log_prob": found["ref_log_probs"],
        "ref_log_prob.row_lengths": found["ref_log_probs.row_lengths"],
    }


def retrieve_log_prob(v: Variant) -> dict[str, Any]:
    lengths = v["lengths"].tolist()
    pieces = zip(v["actor_log_probs"].split(lengths), v["assistant_mask"].bool().split(lengths), strict=True)
    if v.option("assistant_only"):
        rows = [logprobs.of_role_only(row, role_mask_T=mask) for row, mask in pieces]
    else:
        rows = [row for row, _ in pieces]
    return {"ref_log_prob": torch.cat(rows), "row_lengths": torch.tensor([len(row) for row in rows])}


ADAPTERS = {
    "GRPOLoss": grpo_loss,
    "KLRewardTransform.forward": kl_reward,
    "MCAdvantage": torchrl.mc_advantage(slides=True),
    "RetrieveLogProb.forward": retrieve_log_prob,
}

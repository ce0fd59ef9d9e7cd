"""torchtune 0.6.1. `padding_masks` True means: this token participates."""

from typing import Any

import torch

from learner.algorithms import masks
from learner.algorithms.advantages.returns import gae
from learner.algorithms.kl import k1
from learner.algorithms.losses.values import value_clip
from learner.algorithms.objective.token_rewards import place_rewards
from tests.golden import logprobs, peer_parts, sequences, updates
from tests.golden.cases import Variant
from tests.golden.through_objective import Step, aggregated


def _named_mask(v: Variant, setting: str) -> torch.Tensor:
    """Everything where the case names none."""
    name = v.option(setting)
    return torch.ones_like(v.mask()) if name is None else v.mask(name.removeprefix("in."))


def ppo_loss(v: Variant) -> dict[str, Any]:
    mask, value_mask = _named_mask(v, "padding_masks"), _named_mask(v, "value_padding_masks")
    epsilon, aggregation = v.option("epsilon", 0.1), {"name": "token_mean"}
    policy = {"name": "ppo_clip", "epsilon_low": epsilon, "epsilon_high": epsilon}
    step = Step(policy_BT=v["log_probs"], old_BT=v["old_log_probs"], advantages_BT=v["advantages"], mask=mask)
    value = value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=value_mask,
        clip_range=v.option("value_clip_range", 0.2),
    )
    policy_loss = step.loss({"policy_loss": policy, "aggregation": aggregation})
    value_loss = aggregated(value.losses_BT, aggregation, value_mask)
    everything = torch.ones_like(mask)
    ratio = masks.log_ratio(v["log_probs"], over_BT=v["old_log_probs"], mask_BT=everything)
    return {
        "loss": policy_loss + v.option("value_coeff", 0.1) * value_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "ratios": ratio.exp().mean(),
        "clipfrac": masks.masked_mean(step.tokens(policy).clipped_BT.double(), mask_BT=mask),
    }


def estimate_advantages(v: Variant) -> dict[str, Any]:
    """GAE sees padding (no mask); whitening is masked and adds the mean back."""
    everything = torch.ones_like(v.mask())
    advantages, returns = gae(
        v["token_rewards"],
        values_NT=v["values"],
        loss_mask_NT=everything,
        gamma=v.option("gamma"),
        lambda_=v.option("lmbda"),
    )
    mask = v.mask() if v.option("masks") else everything
    return {"advantages": masks.masked(_whiten(advantages, mask, center=False), mask_BT=mask), "returns": returns}


def whiten(v: Variant) -> dict[str, Any]:
    mask = v.mask() if v.option("mask") else torch.ones_like(v.mask())
    return {"out": _whiten(v["entropy"], mask, center=not v.option("shift_mean"))}


def masked_mean(v: Variant) -> dict[str, Any]:
    return {
        "all": masks.masked_mean(v["entropy"], mask_BT=v.mask()),
        "row": masks.masked_mean(v["entropy"], mask_BT=v.mask(), dim=1),
    }


def masked_var(v: Variant) -> dict[str, Any]:
    return {
        "unbiased": peer_parts.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=1),
        "biased": peer_parts.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=0),
    }


def rewards(v: Variant) -> dict[str, Any]:
    """KL per token, taken from the reward; the score lands on the last column, or on the position it is told."""
    everything = torch.ones_like(v.mask())
    kl = k1(v["log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=everything)
    positions = v.option("valid_score_idxs")
    reach = everything if positions is None else torch.arange(kl.shape[1]) <= torch.tensor(positions)[:, None]
    placed = place_rewards(v["scores"], loss_mask_NT=reach)
    kl_reward = -v.option("kl_coeff") * kl
    return {"kl": kl, "kl_reward": kl_reward, "total_reward": placed + kl_reward}


def truncate(v: Variant) -> dict[str, Any]:
    tokens, padding = sequences.truncate_at_stop(
        v["sequences"], stop_tokens=v["stop_tokens"], fill=v.option("fill_value")
    )
    return {"sequences": tokens, "padding_mask": padding}


def penalty_mask(v: Variant) -> dict[str, Any]:
    v.only("padding_masks", "from truncate")
    _, padding = sequences.truncate_at_stop(v["sequences"], stop_tokens=v["stop_tokens"], fill=0)
    mask = sequences.penalty_mask(
        padding,
        lengths_B=torch.tensor(v.option("seq_lens")),
        penalise_no_stop=v.option("penalise_no_eos"),
        min_length=v.option("min_response_length"),
    )
    return {"mask": mask}


def logits_to_logprobs(v: Variant) -> dict[str, Any]:
    labels = v["labels"].clamp(min=0)
    return {"log_probs": logprobs.token_logprobs(v["logits"], token_ids_BT=labels, temperature=v.option("temperature"))}


def batch_log_probs(v: Variant) -> dict[str, Any]:
    mask = v["labels"][:, 1:] != -100
    labels = v["labels"][:, 1:].clamp(min=0)
    per_token = logprobs.token_logprobs(v["logits"][:, :-1], token_ids_BT=labels)
    return {
        "log_probs": logprobs.sequence_logprobs(
            per_token, loss_mask_BT=mask, average=v.option("return_average_logprobs")
        )
    }


def truncate_for_logprobs(v: Variant) -> dict[str, Any]:
    return {"logits": logprobs.completion_logits(v["logits"], prompt_length=v.option("context_length"))}


def _whiten(x: torch.Tensor, mask: torch.Tensor, *, center: bool) -> torch.Tensor:
    return peer_parts.whiten_padding_too(x, loss_mask_NT=mask, center=center)


ADAPTERS = {
    "PPOLoss": ppo_loss,
    "rlhf.estimate_advantages": estimate_advantages,
    "rlhf.whiten": whiten,
    "rlhf.masked_mean": masked_mean,
    "rlhf.masked_var": masked_var,
    "rlhf.get_rewards_ppo": rewards,
    "truncate_sequence_at_first_stop_token": truncate,
    "get_reward_penalty_mask": penalty_mask,
    "logits_to_logprobs": logits_to_logprobs,
    "get_batch_log_probs": batch_log_probs,
    "truncate_sequence_for_logprobs": truncate_for_logprobs,
    "PPOFullFinetuneRecipeSingleDevice.train": updates.torchtune,
}

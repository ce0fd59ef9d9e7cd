"""torchrl 0.14.1: GRPOLoss and its kin, MCAdvantage, KLRewardTransform, RetrieveLogProb."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.advantages import group
from learner.algorithms.batch_rules import filters, selection
from learner.algorithms.corrections import masking
from learner.algorithms.objective.token_rewards import place_rewards
from tests.golden import logprobs
from tests.golden.cases import Uncompared, Unsupported, Variant
from tests.golden.models import load_model
from tests.golden.peer_parts import none
from tests.golden.through_objective import Step, aggregated


def _epsilons(v: Variant) -> tuple[float, float]:
    epsilon = v.option("clip_epsilon", 0.2)
    return tuple(epsilon) if isinstance(epsilon, list) else (epsilon, epsilon)


def _mask(v: Variant) -> Tensor:
    strategy = v.option("masking_strategy")
    return v.mask(f"mask_{strategy}") if strategy else v.mask()


def grpo_loss(loss: str) -> Callable[[Variant], dict[str, Any]]:
    """The objective is a mean over the mask; entropy, KL and clip fraction are means over all positions, padding included."""

    def adapter(v: Variant) -> dict[str, Any]:
        counted = mask = _mask(v)
        policy_BT = logprobs.token_logprobs(v["logits"], token_ids_BT=v["tokens"])
        old_BT, advantages_BT = v["old_log_probs"], v["advantage"].squeeze(-1)
        if v.option("kl_mask_threshold") is not None:
            given = {"rollout_logprobs_BT": old_BT, "loss_mask_BT": mask, "high": v.option("kl_mask_threshold")}
            mask = masking.rejection(policy_BT, **given, estimator="k2") > 0
        low, high = _epsilons(v)
        aggregation, policy = _aggregation(v), {"name": loss, "epsilon_low": low, "epsilon_high": high}
        step = Step(policy_BT=policy_BT, old_BT=old_BT, advantages_BT=advantages_BT, mask=mask)
        ratio = masks.log_ratio(policy_BT, over_BT=old_BT, mask_BT=counted)
        everywhere = torch.ones_like(mask)
        result: dict[str, Any] = {
            "loss_objective": none(step.tokens(policy).losses_BT, loss_mask_NT=mask)
            if aggregation is None
            else step.loss({"policy_loss": policy, "aggregation": aggregation}),
            "clip_fraction": masks.masked_mean(_outside(ratio, low, high).to(ratio.dtype), mask_BT=everywhere),
            "kl_approx": masks.masked_mean(-ratio, mask_BT=everywhere),
            "ESS": _effective_sample_size(ratio, mask),
        }
        coefficient = v.option("entropy_coeff", 0.01)
        if v.option("entropy_bonus", True):
            entropy_BT = masks.masked(logprobs.entropies(v["logits"]), mask_BT=counted)
            result["entropy"] = entropy_BT.mean()
            result["loss_entropy"] = -coefficient * _reduce(entropy_BT, mask, aggregation)
        for name, other, coefficient in (
            ("ref", v["ref_log_probs"], v.option("kl_to_ref_coeff")),
            ("inference", old_BT, v.option("kl_to_inference_coeff")),
        ):
            if coefficient is None or (name == "ref" and coefficient == 0):
                continue
            estimate = kl.k3(policy_BT, other_logprobs_BT=other, loss_mask_BT=mask).mean()
            result |= {f"kl_to_{name}": estimate, f"loss_kl_to_{name}": coefficient * estimate}
        total = sum(value.sum() for name, value in result.items() if name.startswith("loss_"))
        # One prompt's mean, and tokens left as they are, keep a trailing dimension there.
        shapes = {
            name: _with_dimension(value, v)
            for name, value in result.items()
            if name in ("loss_objective", "loss_entropy")
        }
        return result | shapes | {"total": total}

    return adapter


def _aggregation(v: Variant) -> dict[str, Any] | None:
    """None leaves tokens as they are. `reduction="sum"` is taken and ignored."""
    kind, reduction = (
        v.only("aggregation", "token_mean", "prompt_mean", "none"),
        v.only("reduction", None, "mean", "sum", "none"),
    )
    if "none" in (kind, reduction):
        return None
    return {"name": "sequence_mean", "empty_rows": "count"} if kind == "prompt_mean" else {"name": "token_mean"}


def _reduce(x_BT: Tensor, mask: Tensor, aggregation: dict[str, Any] | None) -> Tensor:
    return none(x_BT, loss_mask_NT=mask) if aggregation is None else aggregated(x_BT, aggregation, mask)


def _with_dimension(value: Tensor, v: Variant) -> Tensor:
    is_per_token = value.dim() == 2
    return value[..., None] if is_per_token else value.view(1) if v.option("aggregation") == "prompt_mean" else value


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio.exp() < 1 - low) | (ratio.exp() > 1 + high)


def _effective_sample_size(ratio: Tensor, mask: Tensor) -> Tensor | Uncompared:
    """(Σw)² / (n·Σw²) over tokens."""
    if not mask.any():
        return Uncompared("the effective size of no sample: torchrl gives NaN, a run reports none")
    weights = ratio[mask]
    return (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp() / len(weights)


def k3_token(v: Variant) -> dict[str, Any]:
    other, policy = v[v.option("target_log_prob").removeprefix("in.")], v[v.option("log_prob").removeprefix("in.")]
    return {"kl": kl.k3(policy, other_logprobs_BT=other, loss_mask_BT=torch.ones_like(policy, dtype=torch.bool))}


def kl_reward(v: Variant) -> dict[str, Any]:
    """The reward stands on every token; KL is taken off per token, where the assistant speaks."""
    lengths = v["lengths"].tolist()
    v.only("mask", "first prompt_lengths[i] tokens masked (pad: prompt_lengths[0] for all rows)")
    v.only("reward_in", "scalar", "expanded to tokens")
    v.without_effect("add_to_reward")
    prompts = v["prompt_lengths"].tolist() if v.option("assistant_only", True) else [0] * len(lengths)
    return kl_of_rows(v, [prompts[0]] * len(lengths) if v.option("pad_output") else prompts, v.option("coef"))


def kl_computation(v: Variant) -> dict[str, Any]:
    """No prompt is masked."""
    return kl_of_rows(v, [0] * len(v["lengths"]), v.option("coeff"))


def kl_of_rows(v: Variant, prompts: list[int], coefficient: float) -> dict[str, Any]:
    lengths = v["lengths"].tolist()
    rows = zip(
        v["log_probs"].split(lengths), v["ref_log_probs"].split(lengths), v["reward"].flatten(), prompts, strict=True
    )
    penalties, references, rewards = [], [], []
    for policy, reference, reward, prompt in rows:
        mask = (torch.arange(len(policy)) >= prompt)[None]
        estimate = kl.k1(policy[None], other_logprobs_BT=reference[None], loss_mask_BT=mask)
        placed = place_rewards(reward[None], loss_mask_NT=torch.ones_like(mask), placement="every_token")
        penalties.append(estimate[0])
        references.append(logprobs.of_role(reference[None], role_mask_BT=mask)[0])
        rewards.append((placed - coefficient * estimate)[0])
    return _ragged("kl_penalty", penalties) | _ragged("ref_log_probs", references) | _ragged("reward", rewards)


def _ragged(name: str, rows: list[Tensor]) -> dict[str, Any]:
    return {name: torch.cat(rows), f"{name}.row_lengths": torch.tensor([len(row) for row in rows])}


def mc_advantage(*, slides: bool) -> Callable[[Variant], dict[str, Any]]:
    """Which trajectories make a group is played back here; its advantages are those that a ticket's group has in a run."""

    def adapter(v: Variant) -> dict[str, Any]:
        per_call, num_candidates = v.option("batch", 1), v.option("candidate_group_size")
        if v.option("trajectory_return") is None and v["lengths"].max() > 1:
            raise Unsupported("each step as a sample of its own: our trajectories do not say where a step ends")
        if num_candidates != v.option("candidate_selection_min_size"):
            raise Unsupported("candidates are looked at as each one comes: ours are all judged, and then chosen")
        if per_call > 1 and slides:
            raise Unsupported("groups that overlap within a call overwrite each other's advantages")
        waiting: dict[str, list[tuple[int, Tensor]]] = {}
        result: dict[str, Any] = {}
        num_releases = 0
        rewards = v["rewards"].split(v["lengths"].tolist())
        arrivals = list(zip(v["prompts"], v["traj_ids"].tolist(), rewards, strict=True))
        for first in range(0, len(arrivals), per_call):
            call = arrivals[first : first + per_call]
            if released := [row for each in call for row in _release(v, waiting, *each, slides=slides)]:
                columns = _columns(released, first // per_call)
                result |= {f"rel{num_releases}.{name}": value for name, value in columns.items()}
                num_releases += 1
        return result | {
            "n_releases": torch.tensor(num_releases),
            "queued_prompts_left": {prompt: len(rows) for prompt, rows in waiting.items()},
            "stats": Uncompared("torchrl's running counters"),
        }

    return adapter


def _release(
    v: Variant,
    waiting: dict[str, list[tuple[int, Tensor]]],
    prompt: str,
    identity: int,
    rewards_T: Tensor,
    *,
    slides: bool,
) -> list[tuple[int, Tensor]]:
    """Trajectories with their advantages per step, of the group that this arrival makes full; else none."""
    size, bounds = v.option("grpo_size"), v.option("keep_return_bounds")
    num_wanted = v.option("candidate_group_size", size)
    rows = waiting[prompt] = [*waiting.get(prompt, []), (identity, rewards_T)][-num_wanted:]
    if len(rows) < num_wanted:
        return []
    if not slides:
        del waiting[prompt]
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.max}[v.option("trajectory_return", "sum")]
    returns_G = torch.stack([reduce(rewards) for _, rewards in rows])
    if num_wanted > size:
        places = selection.spread(returns_G, group_size=size)
        rows, returns_G = [rows[place] for place in places], returns_G[places]
    if size == 1 and len(rewards_T) == 1:
        raise Unsupported("one step in a group of one: torchrl gives NaN, we give 0")
    if bounds is not None and not filters.return_bounds(returns_G, low=bounds[0], high=bounds[1]):
        return []
    advantages_G = group.grpo(returns_G, epsilon=1e-6, epsilon_mode="clamp", zero_variance="rounding")
    return [(each, value.expand(len(rewards))) for (each, rewards), value in zip(rows, advantages_G, strict=True)]


def _columns(rows: list[tuple[int, Tensor]], arrival_index: int) -> dict[str, Tensor]:
    return {
        "arrival_index": torch.tensor(arrival_index),
        "traj_id": torch.cat([torch.full((len(values),), identity) for identity, values in rows]),
        "step": torch.cat([torch.arange(len(values)) for _, values in rows]),
        "advantage": torch.cat([values for _, values in rows]),
    }


def select(v: Variant) -> dict[str, Any]:
    """A choice that lies outside the bounds is none. Without bounds there is no middle, and `balanced` is `uniform`."""
    returns, size, bounds = v["returns"].double(), v.option("group_size"), v.option("keep_return_bounds")
    strategy = v.option("strategy", "balanced")
    if strategy == "first" or len(returns) == size:
        places = torch.arange(size)
    elif strategy == "uniform" or bounds is None:
        places = selection.spread(returns, group_size=size)
    else:
        places = selection.balanced(returns, group_size=size, low=bounds[0], high=bounds[1])
    is_kept = bounds is None or filters.return_bounds(returns[places], low=bounds[0], high=bounds[1])
    return {"indices": places.tolist() if is_kept else None}


def retrieve_log_prob(v: Variant) -> dict[str, Any]:
    """Every token given those before it; the first has none and gets 0."""
    model, lengths = load_model(v.root), v["lengths"].tolist()
    rows = []
    with torch.no_grad():
        for tokens in v["tokens"].split(lengths):
            logits = model(input_ids=tokens[None]).logits
            rows.append(logprobs.next_token_logprobs(logits, token_ids_BT=tokens[None])[0])
    if v.option("pad_output"):
        width = max(lengths)
        return {"log_probs": torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])}
    return {"log_probs": torch.cat(rows), "row_lengths": torch.tensor(lengths)}


ADAPTERS = {
    "GRPOLoss": grpo_loss("ppo_clip"),
    "DAPO": grpo_loss("ppo_clip"),
    "CISPOLoss": grpo_loss("clipped_ratio"),
    "k3_kl_token_estimate": k3_token,
    "KLRewardTransform.forward": kl_reward,
    "KLComputation.forward": kl_computation,
    "MCAdvantage": mc_advantage(slides=False),
    "MCAdvantageSelector.select": select,
    "RetrieveLogProb": retrieve_log_prob,
}

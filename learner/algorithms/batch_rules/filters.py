"""Filters choose the groups, trajectories and tokens that train. They run once per step, on the whole batch, before micro-batching.

A filter whose first parameter is of one group, such as `rewards_G`, decides about that group; false drops it. The cluster calls it as soon
as the group is judged, and samples another prompt instead. It sees rewards after the steps of `reward_shaping` before the first one that
needs the whole batch. The learner repeats the same call. Other filters run in the learner only. They return `[N]` (false: the trajectory
leaves the batch and its denominators), `[N, T]` (false: the token's policy loss is left out, but its denominator counts the token), or a
`Selection`, which states both. Filters of tokens see only trajectories that the other filters kept. A token whose loss is left out still
counts in its trajectory's ratio (`gspo`, `gmpo`) and mean advantage (`gmpo`), and gets gradient through them, as in TRL.
Shapes: G trajectories of a group, N of the batch, T tokens.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from learner.algorithms.conditions import LessThan
from learner.algorithms.groups import all_equal
from learner.algorithms.masks import at_least_float32, masked


class Selection(NamedTuple):
    gradient_NT: Tensor
    """False: the policy loss of this token is left out."""
    denominator_NT: Tensor
    """False: the aggregation of the policy loss does not count this token. KL and entropy terms are over all tokens."""


def zero_variance(rewards_G: Tensor) -> bool:
    """Drops groups whose rewards are all equal, and samples others in their place.

    Formula: keep if max_G r > min_G r
    Source: DAPO's dynamic sampling, arXiv:2503.14476
    Degenerate: a group of one is dropped
    Peers: LightRFT dynamic sampling (only all-0 and all-1 rewards), verl `filter_groups`
    """
    return not all_equal(rewards_G)


def zero_variance_components(reward_components_GK: Tensor) -> bool:
    """Drops groups in which no component of the reward differs, and samples others in their place: `zero_variance` for `gdpo`.

    Formula: keep if max_G r_k > min_G r_k for any component k, over the trajectories that have it
    Source: DAPO's dynamic sampling, arXiv:2503.14476, over the components of GDPO, arXiv:2601.05242
    Degenerate: a group of one, or whose rewards have no components, is dropped
    Peers: none
    """
    present = [component_G[~component_G.isnan()] for component_G in reward_components_GK.unbind(1)]
    return any(component.numel() > 0 and not all_equal(component) for component in present)


def return_bounds(rewards_G: Tensor, *, low: Annotated[float, LessThan("high")], high: float) -> bool:
    """Drops groups that are too hard or too easy, and samples others in their place.

    Formula: keep if low < mean_G r < high
    Source: torchrl MCAdvantage; PRIME, arXiv:2502.01456
    Degenerate: bounds of 0 and 1 drop the group that always fails or always succeeds
    Peers: torchrl `keep_return_bounds`; PRIME and verl `filter_accuracy` (bounds included)
    """
    return low < float(rewards_G.mean()) < high


def overlong_mask(truncated_N: Tensor) -> Tensor:
    """Drops truncated trajectories: the reward of the whole completion is unknown.

    Formula: keep if the completion ended by itself
    Source: DAPO's overlong filtering, arXiv:2503.14476
    Degenerate: a batch of truncated trajectories trains nothing
    Peers: TRL `mask_truncated_completions`
    """
    return ~truncated_N


def high_entropy_tokens(
    entropies_NT: Tensor,
    *,
    loss_mask_NT: Tensor,
    share: Annotated[float, Field(ge=0, le=1)] = 0.2,
    over: Literal["batch", "sequence"] = "batch",
    denominator: Literal["all", "kept"] = "all",
) -> Selection:
    """Only the tokens of highest entropy ("forking tokens") get policy gradient.

    Formula: keep if H_t ≥ the (1 − share) quantile of H over the batch's tokens; `over="sequence"` keeps the max(1, ⌊share·n⌋) highest of
        each trajectory
    Source: "Beyond the 80/20 rule", arXiv:2506.01939
    Degenerate: share 1 keeps everything; masked tokens never count. Where entropies tie at the edge, as the first tokens of one prompt's
        trajectories do, rounding decides which stay, and so does the layout of micro-batches
    Peers: TRL `top_entropy_quantile` (batch, all), LightRFT `high_entropy_token_ratio` (sequence, kept)
    """
    entropies_NT = at_least_float32(entropies_NT)
    keep_NT = (_batch_top if over == "batch" else _row_top)(entropies_NT, loss_mask_NT, share)
    return Selection(keep_NT, loss_mask_NT if denominator == "all" else keep_NT)


def _batch_top(entropies_NT: Tensor, loss_mask_NT: Tensor, share: float) -> Tensor:
    entropies_M = entropies_NT[loss_mask_NT].double()
    if not entropies_M.numel() or share <= 0:
        return torch.zeros_like(loss_mask_NT)
    # torch.quantile is limited to 2**24 entries; sorting is not.
    ordered_M = entropies_M.sort().values
    # Rounding must not move a whole-numbered position off its token.
    position = round((1 - share) * (len(ordered_M) - 1), 9)
    below, above = int(position), min(int(position) + 1, len(ordered_M) - 1)
    threshold = torch.lerp(ordered_M[below], ordered_M[above], position - below)
    return (entropies_NT >= threshold.to(entropies_NT.dtype)) & loss_mask_NT


def _row_top(entropies_NT: Tensor, loss_mask_NT: Tensor, share: float) -> Tensor:
    length_N = loss_mask_NT.sum(1)
    num_kept_N = torch.clamp((length_N * share).long(), min=1).minimum(length_N)
    ordered_NT = masked(entropies_NT, mask_BT=loss_mask_NT, fill=-torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    return (ordered_NT.argsort(dim=1) < num_kept_N[:, None]) & loss_mask_NT  # argsort of an order gives ranks

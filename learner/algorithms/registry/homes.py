"""Where the variants of each field of the algorithm section live, and the tensors that they may ask for by name."""

from cluster.contracts.plugins import Home

OF_THE_BATCH = frozenset(
    {
        "rewards_N", "group_index_N", "completion_lengths_N", "truncated_N", "reward_components_NK", "reward_component_names",
        "part_rewards_N", "reward_moments", "columns", "loss_mask_NT", "token_rewards_NT", "values_NT", "entropies_NT",
        "rollout_logprobs_NT", "proximal_logprobs_NT", "reference_logprobs_NT", "policy_versions_NT", "lags_NT", "advantages_NT",
        "segment_index_NT",
    }
)  # fmt: skip
"""Supplied before micro-batching, for the whole batch of the step."""

OF_THE_ROWS = frozenset(
    {
        "policy_logprobs_BT", "proximal_logprobs_BT", "rollout_logprobs_BT", "reference_logprobs_BT", "advantages_BT", "loss_mask_BT",
        "lags_BT", "entropies_BT", "values_BT", "old_values_BT", "returns_BT", "covariances_BT", "batch_covariances_M",
    }
)  # fmt: skip
"""Supplied for the rows of a micro-batch, with the present policy."""

OF_A_GROUP = frozenset({"rewards_G", "completion_lengths_G", "truncated_G", "reward_components_GK"})
"""Supplied once per group. The cluster too calls functions whose first parameter is one of these, as soon as the group is judged."""

SUPPLIED = OF_THE_BATCH | OF_THE_ROWS | OF_A_GROUP

_WITH_NAMES = OF_A_GROUP | {"reward_component_names"}
_WITH_ADVANTAGES = OF_THE_BATCH - {"part_rewards_N", "reward_moments"}
_WITHOUT_ADVANTAGES = _WITH_ADVANTAGES - {"advantages_NT"}

SUPPLIED_TO: dict[str, tuple[frozenset[str], ...]] = {
    "advantage": (_WITHOUT_ADVANTAGES, _WITH_NAMES),
    "policy_loss": (OF_THE_ROWS,),
    "aggregation": (_WITHOUT_ADVANTAGES,),
    "value.loss": (OF_THE_ROWS,),
    "value.aggregation": (_WITHOUT_ADVANTAGES,),
    "reward_shaping": (OF_THE_BATCH - {"advantages_NT", "token_rewards_NT"}, _WITH_NAMES),
    "advantage_shaping": (_WITH_ADVANTAGES,),
    "filters": (_WITHOUT_ADVANTAGES, _WITH_NAMES),
    "selection": (_WITH_NAMES,),
    "corrections": (_WITH_ADVANTAGES, OF_THE_ROWS),
}
"""By field, the tensors that its functions may ask for: the first set that contains a function's first parameter."""


def _home(package: str, *works_on: str, called_with: tuple[str, ...] = ()) -> Home:
    return Home(
        package=f"learner.algorithms.{package}", called_with=called_with, offers=SUPPLIED, works_on=frozenset(works_on)
    )


_AGGREGATION = _home("batch_rules.aggregation", "loss_mask_NT")

HOMES: dict[str, Home] = {
    "advantage": _home("advantages", "rewards_G", "rewards_N", "reward_components_NK", "token_rewards_NT"),
    "policy_loss": _home("losses", "policy_logprobs_BT"),
    "aggregation": _AGGREGATION,
    "value.loss": _home("losses", "values_BT"),
    "value.aggregation": _AGGREGATION,
    "reward_shaping": _home("batch_rules.shaping", "rewards_G", "rewards_N"),
    "advantage_shaping": _home("batch_rules.shaping", "advantages_NT"),
    "filters": _home("batch_rules.filters", *OF_A_GROUP, *OF_THE_BATCH),
    "selection": _home("batch_rules.selection", "rewards_G", called_with=("group_size",)),
    "corrections": _home("corrections", "proximal_logprobs_BT", "policy_logprobs_BT", "lags_BT", *OF_THE_BATCH),
}
"""By the field that names them."""

"""Presets: named bundles of ordinary configuration. `{preset: dapo, ...}` becomes the bundle with your own fields on top.

A field you give replaces the preset's: a variant as a whole (`policy_loss: gspo`), or, when you name no other variant, its parameters
(`policy_loss: {epsilon_high: 0.3}`); sections (`kl` and its terms, `value`) are merged; lists are replaced. An override that contradicts
the preset is refused.
"""

from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import ConfigError

_GRPO: dict[str, Any] = {
    "advantage": {"name": "grpo", "epsilon": 1e-6},
    "policy_loss": {"name": "ppo_clip"},
    "aggregation": "sequence_mean",
}
"""GRPO without its KL, the base of many presets."""
_PPO: dict[str, Any] = {
    "advantage": {"name": "gae", "gamma": 1.0, "lambda_": 0.95},
    "advantage_shaping": ["whiten"],
    "policy_loss": {"name": "ppo_clip"},
    "aggregation": "token_mean",
    "kl": {"reward": {"coefficient": 0.05, "estimator": "k1"}},
    "value": {"loss": {"name": "value_clip", "clip_range": 0.2}, "coefficient": 0.1},
}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {**_GRPO, "kl": {"loss": {"coefficient": 0.04, "estimator": "k3"}}},
    "dr_grpo": {"advantage": "dr_grpo", "policy_loss": {"name": "ppo_clip"}, "aggregation": "sequence_sum_over_length"},
    "dapo": {
        **_GRPO,
        "policy_loss": {"name": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28},
        "aggregation": "token_mean",
        "filters": ["zero_variance", "overlong_mask"],
    },
    "lite_ppo": {"advantage": "group_mean_batch_std", "policy_loss": {"name": "ppo_clip"}, "aggregation": "token_mean"},
    "gspo": {
        **_GRPO,
        "policy_loss": {"name": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        # The bounds are tighter than an engine's rounding: against its log-probs they would clip noise.
        "proximal": "recompute",
    },
    "cispo": {
        "advantage": "reinforce_pp_baseline",
        "policy_loss": {"name": "cispo", "epsilon_max": 5.0},
        "aggregation": "prompt_mean",
    },
    "rloo": {
        "advantage": "rloo",
        "policy_loss": "reinforce",
        "aggregation": "sequence_sum_mean",
        "kl": {"reward": {"coefficient": 0.05, "estimator": "k1"}},
    },
    "reinforce_pp": {
        "advantage": "cumulative_returns",
        "advantage_shaping": ["whiten"],
        "policy_loss": {"name": "ppo_clip"},
        "aggregation": "token_mean",
        "kl": {"reward": {"coefficient": 0.01, "estimator": "k1"}},
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "policy_loss": {"name": "ppo_clip"},
        "aggregation": "token_mean",
        "kl": {"loss": {"coefficient": 0.01, "estimator": "k2"}},
    },
    "ppo": _PPO,
    "cpgd": {
        "advantage": {"name": "cpgd", "center": "mean"},
        "policy_loss": {"name": "cpgd"},
        "aggregation": "token_mean",
        "kl": {"rollout": {"coefficient": 0.01, "estimator": "drift"}},
    },
    "sapo": {**_GRPO, "policy_loss": {"name": "sapo"}},
    "gmpo": {**_GRPO, "policy_loss": {"name": "gmpo"}},
    "decoupled_ppo": {**_GRPO, "aggregation": "token_mean", "corrections": ["decoupled"], "proximal": "recompute"},
    "grpo_ewma": {**_GRPO, "aggregation": "token_mean", "corrections": ["decoupled"], "proximal": "ewma"},
    "tapeagents_grpo": {
        **_GRPO,
        "advantage": {"name": "grpo", "epsilon": 1e-4},
        "kl": {"loss": {"coefficient": 0.1, "estimator": "k3", "log_ratio_clamp": 10.0}},
    },
    "tapeagents_0_1_0_grpo": {
        **_GRPO,
        "advantage": {"name": "grpo", "epsilon": 1e-4},
        "aggregation": "token_mean",
        "kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}},
    },
    "torchrl_grpo": {
        **_GRPO,
        "advantage": {"name": "grpo", "epsilon": 1e-6, "epsilon_mode": "clamp"},
        "aggregation": "token_mean",
        "entropy_coefficient": 0.01,
    },
    "lightrft_group_norm": {
        **_GRPO,
        "advantage": {"name": "grpo", "epsilon": 1e-8},
        "kl": {"loss": {"coefficient": 0.001, "estimator": "k3"}},
    },
    "trl_grpo": {**_GRPO, "advantage": {"name": "grpo", "epsilon": 1e-4}},
    "verl_grpo": {
        **_GRPO,
        "advantage": {"name": "grpo", "epsilon": 1e-6, "singleton": "raw"},
        "policy_loss": {"name": "ppo_clip", "dual_clip": 3.0, "log_ratio_clamp": 20.0},
        "aggregation": "token_mean",
    },
    "on_policy_distillation": {
        "advantage": "none",
        "policy_loss": "importance_sampling",
        "aggregation": "token_mean",
        "kl": {"reward": {"coefficient": 1.0, "estimator": "k1", "credit": "token"}},
    },
    "on_policy_distillation_top_k": {
        "advantage": "none",
        "aggregation": "token_mean",
        "distillation": {"coefficient": 1.0, "top_k": 64, "direction": "reverse"},
    },
    "torchtune_ppo": {
        **_PPO,
        "advantage_shaping": [{"name": "whiten", "center": False}],
        "policy_loss": {"name": "ppo_clip", "epsilon_low": 0.1, "epsilon_high": 0.1},
        "kl": {"reward": {"coefficient": 0.01, "estimator": "k1"}},
    },
}
"""Each is an algorithm section; fields that it leaves out have AlgorithmConfig's defaults."""

VERSIONS = {
    "tapeagents_grpo": "TapeAgents 0.1.16",
    "tapeagents_0_1_0_grpo": "TapeAgents 0.1.0",
    "torchrl_grpo": "torchrl 0.14.1; commit 77dbc6c9f is the same where nothing is padded",
    "lightrft_group_norm": "LightRFT, commit 30bc53d and main",
    "trl_grpo": 'TRL 1.16.0 with `loss_type="grpo"`; its default `dapo` is aggregation `token_mean`',
    "verl_grpo": "verl 0.9.1",
    "torchtune_ppo": "torchtune 0.6.1",
}
"""The version of the system that a preset is named for: its numbers were compared through a run's objective."""

_POINT_OF = {
    "dr_grpo": ("advantage", ("dr_grpo", "mean_centered"), "Dr. GRPO does not divide by the group's spread"),
    "rloo": ("advantage", ("rloo",), "the leave-one-out baseline is the algorithm"),
    "gspo": ("policy_loss", ("gspo", "gspo_token"), "the ratio of the whole trajectory is the algorithm"),
    "cispo": ("policy_loss", ("cispo",), "the detached, truncated ratio is the algorithm"),
    "cpgd": ("policy_loss", ("cpgd",), "the clipped log-ratio is the algorithm"),
    "sapo": ("policy_loss", ("sapo",), "the soft gate is the algorithm"),
    "gmpo": ("policy_loss", ("gmpo",), "the geometric mean is the algorithm"),
    "ppo": ("advantage", ("gae",), "GAE over a critic is the algorithm"),
    "torchtune_ppo": ("advantage", ("gae",), "GAE over a critic is the algorithm"),
}
_VARIANTS = ("advantage", "policy_loss", "aggregation")


def expand(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`{preset: name, ...overrides}` as ordinary configuration; without a preset, as it is.

    Raises ConfigError for an unknown preset, or an override that contradicts it.
    """
    own = dict(raw)
    name = own.pop("preset", None)
    if name is None:
        return own
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"algorithm.preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    _refuse_contradiction(name, own)
    bundle = dict(PRESETS[name])
    for field, value in own.items():
        bundle[field] = _merged(field, bundle.get(field), value)
    return bundle


def _merged(field: str, preset: Any, own: Any) -> Any:
    if field in _VARIANTS:
        return _merged_variant(preset, own)
    if field in ("kl", "value") and isinstance(preset, Mapping) and isinstance(own, Mapping):
        return {**preset, **{key: _merged_variant(preset.get(key), value) for key, value in own.items()}}
    return own


def _merged_variant(preset: Any, own: Any) -> Any:
    if not isinstance(own, Mapping) or "name" in own or not isinstance(preset, str | Mapping):
        return own
    return ({"name": preset} if isinstance(preset, str) else dict(preset)) | dict(own)


def _refuse_contradiction(name: str, own: Mapping[str, Any]) -> None:
    if name in ("ppo", "torchtune_ppo") and "value" in own and own["value"] is None:
        raise ConfigError(
            f"algorithm.preset={name!r} with value=None: PPO needs its critic; drop `value`, or use preset 'grpo'"
        )
    field, allowed, why = _POINT_OF.get(name, ("", (), ""))
    chosen = own.get(field)
    chosen = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    if chosen is not None and chosen not in allowed and ":" not in str(chosen):
        raise ConfigError(
            f"algorithm.preset={name!r} with {field}={chosen!r}: {why}; drop one of the two "
            f"(`algorithm.{field}=null` on the command line does), or write the parts without a preset"
        )

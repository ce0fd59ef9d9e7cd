"""Whether a run directory's configuration and another one are of the same run: the mathematics may not change in the middle of it."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

MAY_CHANGE = (
    "run_dir",
    "num_steps",
    "checkpoint",
    "elastic",
    "evaluation",
    "metrics",
    "supervision",
    "rollout.num_workers",
    "learner.num_ranks",
)
"""Settings, or sections, that a resumed run may have otherwise (`num_steps` with a constant schedule, `num_workers` unless
deterministic); besides these, timeouts and how many CPUs, GPUs and threads."""
_SECTIONS_WITH_RESOURCES = ("learner", "reference", "reward", "rollout", "weights")
_RESOURCES = (
    "timeout_s",
    "num_threads",
    "cpus",
    "gpus",
    "cpus_per_rank",
    "gpus_per_rank",
    "cpus_per_worker",
    "gpus_per_worker",
)


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that make two resolved configurations different runs: name -> (theirs, ours)."""
    left, right = dict(_flat(theirs)), dict(_flat(ours))
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name) and not _may_change(name, theirs)
    }


def _may_change(name: str, theirs: Mapping[str, Any]) -> bool:
    if name == "num_steps":  # a schedule that ends with the run gives its past steps other learning rates
        return theirs.get("optimizer", {}).get("schedule", "constant") == "constant"
    if name == "rollout.num_workers":  # which worker samples what is part of a deterministic run
        return not theirs.get("deterministic", False)
    section, _, setting = name.partition(".")
    is_resource = section in _SECTIONS_WITH_RESOURCES and setting in _RESOURCES
    return is_resource or any(name == free or name.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(cast(Mapping[str, Any], item), f"{name}.")
        else:
            yield name, item

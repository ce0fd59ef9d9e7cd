"""No reward: for runs that learn from something else."""

from collections.abc import Mapping
from typing import Any


def none(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """0 for every completion: a teacher (`preset: on_policy_distillation`) or demonstrations (`algorithm.sft`) say what is good."""
    return 0.0

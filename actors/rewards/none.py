"""No reward, for runs that learn from another signal."""

from collections.abc import Mapping
from typing import Any


def none(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """0 for every completion. The run learns from a teacher (`preset: on_policy_distillation`) or from demonstrations (`algorithm.sft`)."""
    return 0.0

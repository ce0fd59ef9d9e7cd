"""Imports reasoning_gym in a third of the time: two of its tasks use a library that imports matplotlib, which is postponed."""

from cluster.contracts.importing import postpone

postpone("cellpylib")

import reasoning_gym as gym  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402
from reasoning_gym.utils import extract_answer  # noqa: E402

__all__ = ["DATASETS", "extract_answer", "gym"]

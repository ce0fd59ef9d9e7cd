"""`--steps`: one step, or a range of steps."""

import re

from cluster.contracts.errors import ConfigError


def step_range(steps: str) -> tuple[int, int]:
    """First and last of `12`, or `10-20`. Raises ConfigError for anything else."""
    if (asked := re.fullmatch(r"(\d+)(?:-(\d+))?", steps)) is None:
        raise ConfigError(f"--steps={steps!r} is neither a step, such as 12, nor a range, such as 10-20")
    return int(asked[1]), int(asked[2] or asked[1])

"""Steps as an option of the command line names them."""

import re

from cluster.contracts.errors import ConfigError


def step_range(steps: str) -> tuple[int, int]:
    """First and last of `12`, or `10-20`. Raises ConfigError for anything else."""
    if (asked := re.fullmatch(r"(\d+)(?:-(\d+))?", steps)) is None:
        raise ConfigError(f"--steps={steps!r} is no number of a step, as 12, and no range of them, as 10-20")
    return int(asked[1]), int(asked[2] or asked[1])

"""Reward for a completion's length in tokens."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from cluster.contracts.errors import ConfigError


def length(
    *,
    token_ids: Sequence[int],
    at_most: Annotated[int, Field(ge=1)],
    at_least: Annotated[int, Field(ge=0)] = 1,
    fade: Annotated[int, Field(ge=0)] = 0,
) -> float:
    """1 from `at_least` to `at_most` tokens, 0 below `at_least`. Above `at_most` it falls linearly, to 0 at `at_most + fade`.

    With `at_most` = `sampling.max_tokens` - `fade` it is DAPO's soft overlong punishment plus 1 (arXiv:2503.14476).
    """
    if at_least > at_most:
        raise ConfigError(f"at_least={at_least} is more than at_most={at_most}, so no length earns 1; lower it")
    excess = len(token_ids) - at_most
    if len(token_ids) < at_least or excess > fade:
        return 0.0
    return 1.0 - max(excess, 0) / (fade or 1)

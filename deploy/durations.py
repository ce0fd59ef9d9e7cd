"""Times on the command line: 90s, 10m, 2h."""

import re

from cluster.contracts.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str, *, option: str) -> float:
    """Raises ConfigError that names the option."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)):
        raise ConfigError(f"{option}={text!r} is not a time; write it as 90s, 10m or 2h")
    return float(found[1]) * _UNITS_S[found[2]]

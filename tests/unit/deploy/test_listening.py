"""Addresses that cannot be had are one clear error."""

import pytest

from cluster.contracts.errors import ConfigError
from deploy.listening import bound


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_of_a_machine_is_refused(host: str):
    """Seen before: a traceback of Python's codec."""
    with pytest.raises(ConfigError, match=r"--host .* cannot be bound: .*; use another"):
        bound(host, 0)

"""Problems as they are found, to be told all at once."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cluster.contracts.errors import ConfigError, TreadwheelError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """What checks found, in the order in which they were made."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    @property
    def are_none(self) -> bool:
        return not self._messages

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `check` returns; None when it raised one of our errors, which is a problem then."""
        try:
            return check(*args, **kwargs)
        except TreadwheelError as error:
            self._messages.append(str(error))
            return None

    def raise_all(self) -> None:
        """Raises ConfigError if there was a problem."""
        messages = list(dict.fromkeys(self._messages))
        if len(messages) == 1:
            raise ConfigError(messages[0])
        if messages:
            raise ConfigError(f"{len(messages)} problems" + "".join(f"\n  {message}" for message in messages))

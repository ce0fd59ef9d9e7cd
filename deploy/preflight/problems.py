"""Collects the problems that checks find, so that one error names them all."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cluster.contracts.errors import ConfigError, TreadwheelError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    def __init__(self) -> None:
        self._messages: list[str] = []

    @property
    def are_none(self) -> bool:
        return not self._messages

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `check`; None if it raised one of our errors, which becomes a problem."""
        try:
            return check(*args, **kwargs)
        except TreadwheelError as error:
            self._messages.append(str(error))
            return None

    def raise_all(self) -> None:
        """Raises one ConfigError with all problems, if there are any."""
        messages = list(dict.fromkeys(self._messages))
        if len(messages) == 1:
            raise ConfigError(messages[0])
        if messages:
            raise ConfigError(f"{len(messages)} problems" + "".join(f"\n  {message}" for message in messages))

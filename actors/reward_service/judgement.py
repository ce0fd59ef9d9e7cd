"""Loads and calls judges. A returned number becomes a `Reward`, an exception becomes a status, never a zero.

The names of a judge's parameters choose its kind: `completion` is for one trajectory, `completions` for a whole group.
"""

import asyncio
import dataclasses
import hashlib
import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from typing import Any

from pydantic import TypeAdapter

from actors.returned import MAX_MESSAGE, to_reward
from actors.writable import writable
from cluster.contracts.errors import ConfigError, DataError, UnavailableError
from cluster.contracts.foreign import described, line_of, source_bytes
from cluster.contracts.hiding import hidden
from cluster.contracts.plugins import OF_EITHER, OF_ONE_OR_ALL, REWARDS, Plugin, is_async, resolve
from cluster.contracts.types import Reward, RewardStatus

Judged = list[Reward] | None
"""One reward a trajectory of a call. None if a judge of groups gives no verdict on any of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFacts:
    """Facts about a judge that the service needs."""

    asks: frozenset[str]
    """Names of the arguments that it takes."""
    is_of_groups: bool
    """A call judges a whole group. False: one trajectory."""
    is_async: bool
    """It takes calls concurrently. False: one at a time."""
    keeps_verdicts: bool
    """Declared by an attribute of this name: verdicts are expensive, and equal questions have equal answers."""
    digest: str
    """Of its source file and its attribute `identity`: whatever else decides its verdicts, or a function, whose source file counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge(JudgeFacts):
    """A function, or an instance of a class, with its parameters bound."""

    call: Callable[..., Any]


FACTS = TypeAdapter(JudgeFacts)


def find_judge(judge: Plugin, *, field: str = "reward.judge") -> Judge:
    """Builds the judge. Raises ConfigError naming `field` if it does not import, its parameters do not fit, or it mixes both kinds."""
    call = resolve(judge, home=REWARDS, field=field)
    if inspect.isclass(call.func):  # pyright: ignore[reportFunctionMemberAccess]  resolve binds parameters
        try:
            call = call()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{field}={judge.name!r} cannot be built: {type(error).__name__}: {error}") from error
        if not callable(call):
            raise ConfigError(f"{field}={judge.name!r} is a class without __call__, which a judge needs")
    asks = _asked(call, f"{field}={judge.name!r}")
    return Judge(
        call=call,
        asks=asks,
        is_of_groups=bool(asks & {*OF_ONE_OR_ALL.values()}),
        is_async=is_async(call),
        keeps_verdicts=getattr(getattr(call, "func", call), "keeps_verdicts", False),
        digest=_digest(getattr(call, "func", call)),
    )


def judge_now(
    judge: Judge,
    given: Mapping[str, Any],
    *,
    size: int = 1,
    run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> Judged:
    """Calls a synchronous judge on `size` trajectories. `run` runs a coroutine to its end.

    Raises MemoryError if the process is out of memory, and UnavailableError if the judge's server is away.
    """
    own = os.getpid()
    try:
        value = judge.call(**given)
        if inspect.isawaitable(value):  # an adapter of another library's asynchronous function
            value = run(_awaited(value))
        return _judged(judge, value, size)
    except (MemoryError, UnavailableError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and os.getpid() != own:  # in a child that the judge forked
            raise
        return [failed(error)] * size


async def judge_async(judge: Judge, given: Mapping[str, Any], *, size: int = 1) -> Judged:
    """Awaits an asynchronous judge. Raises as `judge_now`."""
    try:
        return _judged(judge, await judge.call(**given), size)
    except (MemoryError, UnavailableError):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a judge is foreign code, and this is one call of it
        return [failed(error)] * size


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def to_rewards(value: Any, *, size: int) -> Judged:
    """Converts a list of one value a trajectory as `to_reward`. None for all means no verdict, None for some means a failed reward each.

    Raises DataError for anything but a list, an array or a tensor, which have an order, and for a wrong length.
    """
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise DataError(f"the judge returned a {type(value).__name__} for a group; it must be a list of {size} rewards")
    values: list[Any] = list(value)
    if len(values) != size:
        raise DataError(f"the judge returned {len(values)} rewards for a group of {size}; it must return one for each")
    if all(each is None for each in values):
        return None
    return [_reward_or_failure(each) for each in values]


def failed(error: BaseException, *, stage: str = "") -> Reward:
    stage = stage or getattr(error, "stage", None) or ""
    said, line = hidden(described(error)), line_of(error)
    if line and ": " not in said:  # a bare `assert`
        said += ":"
    message = writable(f"{stage} {said}".lstrip()[: MAX_MESSAGE - len(line)] + line)
    return Reward(value=None, status=RewardStatus.ERROR, message=message)


def timed_out(timeout_s: float, *, setting: str) -> Reward:
    message = f"no reward within {setting}={timeout_s:g}; raise it, or make the judge faster"
    return Reward(value=None, status=RewardStatus.TIMEOUT, message=message)


def _asked(call: Callable[..., Any], what: str) -> frozenset[str]:
    parameters = inspect.signature(call).parameters.values()
    names = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    one, every = names & {*OF_ONE_OR_ALL}, names & {*OF_ONE_OR_ALL.values()}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    if one and every:
        raise ConfigError(
            f"{what} takes {', '.join(sorted(one))} of one trajectory and {', '.join(sorted(every))} of the group; use only singular "
            "names, or only plural names"
        )
    if not (one or every or takes_any):
        raise ConfigError(
            f"{what} takes nothing of a trajectory; name its parameters so: {', '.join(OF_ONE_OR_ALL)}, or in the plural "
            f"{', '.join(OF_ONE_OR_ALL.values())}"
        )
    for each in parameters:
        is_bound = each.default is not inspect.Parameter.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if not is_bound and each.name not in REWARDS.given:
            raise ConfigError(
                f"{what} needs {each.name}, which no judge gets; a judge can get: {', '.join(sorted(REWARDS.given))}"
            )
    if takes_any:
        one, every = (set[str](), {*OF_ONE_OR_ALL.values()}) if every else ({*OF_ONE_OR_ALL}, set[str]())
    return frozenset(one | every | (names & {*OF_EITHER}) | ({"columns"} if takes_any else set()))


def _digest(judge: Any) -> str:
    identity = getattr(judge, "identity", "")
    digest = hashlib.sha256(source_bytes(judge))
    digest.update(source_bytes(identity) if callable(identity) else str(identity).encode())
    return digest.hexdigest()


def _judged(judge: Judge, value: Any, size: int) -> Judged:
    return to_rewards(value, size=size) if judge.is_of_groups else [to_reward(value)]


def _reward_or_failure(value: Any) -> Reward:
    try:
        return to_reward(value)
    except DataError as error:
        return failed(error)

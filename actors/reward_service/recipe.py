"""Selects the parts that judge a prompt, and sums their verdicts. Pure functions, with all rules of failure in one place.

A failed part either fails its trajectory or leaves the recipe for the whole group. It never leaves for one trajectory alone, whose reward
would then be on another scale than the rest of its group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.reward_service.judgement import Judged, failed
from cluster.contracts.errors import DataError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig, RewardPart
from cluster.contracts.types import Reward, RewardStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One judge with its weight and limits, every setting resolved."""

    name: str | None
    """None for `reward.judge`, the short form with a single judge, whose components are those of the reward."""
    judge: Plugin
    weight: float
    timeout_s: float
    max_concurrency: int
    leaves_on_failure: bool
    cache: bool | None
    """None: the judge's `keeps_verdicts` decides."""

    @property
    def setting(self) -> str:
        """Its place in the run file."""
        return "reward" if self.name is None else f"reward.parts.{self.name}"

    @property
    def stage(self) -> str:
        """Names the part in events and metrics of failed rewards."""
        return "judge" if self.name is None else f"judge:{self.name}"


def parts_of(config: RewardConfig) -> list[Part]:
    """All parts, in the order of the run file."""
    parts = config.parts or {None: RewardPart(judge=config.judge)}
    return [
        Part(
            name=name,
            judge=part.judge,
            weight=part.weight,
            timeout_s=part.timeout_s or config.timeout_s,
            max_concurrency=part.max_concurrency or config.max_concurrency,
            leaves_on_failure=part.on_failure == "part",
            cache=part.cache,
        )
        for name, part in parts.items()
    ]


def names_for(config: RewardConfig, columns: Mapping[str, Any]) -> Sequence[str | None]:
    """Names of the parts that judge a prompt with these columns. Raises DataError if the prompt's source has no recipe."""
    if not config.by_source:
        return [*config.parts] or [None]
    source = columns.get(config.source_column)
    if source is None or str(source) not in config.by_source:
        raise DataError(
            f"reward.by_source has no entry for the source {source!r} (column {config.source_column!r}); it has: "
            f"{', '.join(config.by_source)}"
        )
    return config.by_source[str(source)]


def reward_of(verdicts: Mapping[Part, Judged], *, size: int) -> list[Reward]:
    """The group's rewards: the sum of weight times part, over the parts that did not leave."""
    stays = {part: judged for part, judged in verdicts.items() if judged is not None and not _leaves(part, judged)}
    if not stays:
        why = "; ".join(dict.fromkeys(_why_it_left(part, judged) for part, judged in verdicts.items()))
        return [failed(DataError(f"no part of the recipe has a verdict: {why}"))] * size
    if [part.name for part in verdicts] == [None]:
        (judged,) = stays.values()
        return judged
    left = {part: judged for part, judged in verdicts.items() if part not in stays}
    notes = "; ".join(_why_it_left(part, judged) for part, judged in left.items() if judged is not None) or None
    absent: dict[str, float | None] = {str(part.name): None for part in left}
    return [_sum({part: judged[row] for part, judged in stays.items()}, absent, notes) for row in range(size)]


def _sum(of_parts: Mapping[Part, Reward], absent: Mapping[str, float | None], notes: str | None) -> Reward:
    components = dict(absent)
    for part, reward in of_parts.items():
        components[str(part.name)] = reward.value
        components |= {f"{part.name}/{name}": value for name, value in reward.components.items()}
    failures = [(part, reward) for part, reward in of_parts.items() if reward.value is None]
    if failures:
        return Reward(
            value=None,
            status=failures[0][1].status,
            components=components,
            message="; ".join(f"{part.stage} {reward.message}" for part, reward in failures),
        )
    weighted = [part.weight * reward.value for part, reward in of_parts.items() if reward.value is not None]
    try:
        total = math.fsum(weighted)
    except (OverflowError, ValueError):  # an intermediate overflow, or infinity minus infinity
        total = math.nan
    if not math.isfinite(total):
        return failed(DataError(f"the weighted sum of the parts is not finite: {total}"))
    return Reward(value=total, components=components, message=notes)


def _leaves(part: Part, judged: Sequence[Reward]) -> bool:
    return part.leaves_on_failure and any(reward.status is not RewardStatus.OK for reward in judged)


def _why_it_left(part: Part, judged: Judged) -> str:
    first = next((reward for reward in judged or () if reward.status is not RewardStatus.OK), None)
    return f"{part.stage} left the recipe: {'no verdict on any trajectory' if first is None else first.message}"

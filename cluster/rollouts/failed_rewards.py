"""What failed rewards tell: each group an event, each kind of failure once in a run a message for people."""

from dataclasses import asdict

from cluster.contracts.protocols import Events
from cluster.contracts.types import GroupSummary

_MOST_TOLD = 16
"""Kinds of failure that get a message; further ones are in the events."""


class FailedRewards:
    """Remembers which kinds of failure were told."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._told: set[str] = set()

    def note(self, summary: GroupSummary) -> None:
        """Logs `reward_failure` if a reward of this group failed."""
        if summary.num_failed_rewards == 0:
            return
        news = [failure.kind for failure in summary.reward_failures if failure.kind not in self._told]
        is_told = bool(news) and len(self._told) < _MOST_TOLD
        self._told.update(news if is_told else ())
        self._events.event(
            "reward_failure",
            group_id=summary.group_id,
            prompt_id=summary.prompt_id,
            num_errors=summary.num_reward_errors,
            num_timeouts=summary.num_reward_timeouts,
            failures=[asdict(failure) for failure in summary.reward_failures],
            **({"message": f"prompt {summary.prompt_id!r}: {describe(summary)}"} if is_told else {}),
        )


def describe(summary: GroupSummary) -> str:
    """`3 of 8 rewards failed: KeyError: 'anser'`, with each kind's first message."""
    reasons = "; ".join(failure.message for failure in summary.reward_failures) or "no reason given"
    return f"{summary.num_failed_rewards} of {summary.num_trajectories} rewards failed: {reasons}"

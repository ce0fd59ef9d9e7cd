"""What the parts of the reward came to in the groups that were judged: each part's failures and time, and means by source."""

from collections import Counter
from collections.abc import Sequence

from cluster.contracts.types import GroupSummary, Ticket, mean_of


class PartMetrics:
    """Sums since the last `drain`. Held-out groups count nowhere: their places in the start order are below 0."""

    def __init__(self, *, source_column: str | None) -> None:
        """None: the run does not tell sources apart."""
        self._source_column = source_column
        self._seconds: dict[str, list[float]] = {}
        self._num_failed: dict[str, int] = {}
        self._rewards: dict[str, list[float]] = {}
        self._num_groups = Counter[str]()

    def note(self, ticket: Ticket, summary: GroupSummary) -> None:
        """The group is judged."""
        if ticket.index < 0:
            return
        for name, stats in summary.part_stats.items():
            self._seconds.setdefault(name, []).append(stats.seconds)
            self._num_failed[name] = self._num_failed.get(name, 0) + stats.num_failed
        if self._source_column is not None:
            source = ticket.prompt.columns.get(self._source_column)
            self._num_groups[str(source)] += 1
            # A component that a judge calls `mean` gives way, as in the metrics of a step.
            for name, values in {**summary.reward_components, "mean": summary.rewards}.items():
                self._add(f"{name}/{source}", values)

    def drain(self) -> dict[str, float]:
        """By the names in `METRICS`. The only judge of a reward without parts has no name."""
        seconds, num_failed, rewards = self._seconds, self._num_failed, self._rewards
        self._seconds, self._num_failed, self._rewards = {}, {}, {}
        num_groups, self._num_groups = self._num_groups, Counter[str]()
        return {
            **{f"time/{name}/judging_s".replace("//", "/"): mean_of(each) for name, each in seconds.items()},
            **{f"reward/{name}/num_failed": float(each) for name, each in num_failed.items() if name},
            **{f"reward/{name}": mean_of(each) for name, each in rewards.items()},
            **{f"prompts/num_groups/{source}": float(number) for source, number in num_groups.items()},
        }

    def _add(self, name: str, values: Sequence[float | None]) -> None:
        if known := [value for value in values if value is not None]:
            self._rewards.setdefault(name, []).extend(known)

"""Metrics of judged groups: failures and seconds of each reward part, and mean rewards by source."""

from collections import Counter
from collections.abc import Sequence

from cluster.contracts.types import GroupSummary, Ticket, mean_of


class PartMetrics:
    """Totals since the last `drain`. Held-out groups, whose indices are negative, do not count."""

    def __init__(self, *, source_column: str | None) -> None:
        """`source_column` None: no metrics by source."""
        self._source_column = source_column
        self._seconds: dict[str, list[float]] = {}
        self._num_failed: dict[str, int] = {}
        self._rewards: dict[str, list[float]] = {}
        self._num_groups = Counter[str]()

    def note(self, ticket: Ticket, summary: GroupSummary) -> None:
        """Adds a judged group."""
        if ticket.index < 0:
            return
        for name, stats in summary.part_stats.items():
            self._seconds.setdefault(name, []).append(stats.seconds)
            self._num_failed[name] = self._num_failed.get(name, 0) + stats.num_failed
        if self._source_column is not None:
            source = ticket.prompt.columns.get(self._source_column)
            self._num_groups[str(source)] += 1
            # The reward's mean replaces a component that is named `mean`, as in the metrics of a step.
            for name, values in {**summary.reward_components, "mean": summary.rewards}.items():
                self._add(f"{name}/{source}", values)

    def drain(self) -> dict[str, float]:
        """By the names in `METRICS`. The judge of a reward without parts has the name ""."""
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

"""Pass rates of prompts, and which prompts they make worth sampling: a function of the record alone.

Timing must not decide which steps a choice knows. Let N(s) be the index after the last group of step s, g the groups of a step and n the
bound on staleness: the choice for index i knows exactly the steps s with N(s) + n g <= i. They are learned when i starts, because the
buffer holds i back until they are. So a resumed run, which reads pass rates from the ledger, makes the same choices as the run before it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter

from cluster.contracts.prompts_config import DifficultyConfig
from cluster.contracts.types import GroupSummary, is_success

_LEAST = 0.1
"""Preference of the prompts farthest from the target. Not 0, because training on other prompts may have changed their rates."""


class PassRates:
    """Pass rates by prompt and step.

    Sources: a binary reward has its largest variance, p (1 - p), at a pass rate of one half (Foster and Foerster, arXiv:2502.12272), and
    AdaRFT samples around that (arXiv:2504.05520). Peers: prime-rl keeps pools of easy, normal and hard prompts by their mean reward; verl
    calls a user's sampler after every step.
    """

    def __init__(
        self, config: DifficultyConfig, *, lag: int, recorded: Iterable[tuple[int, Mapping[str, float]]] = ()
    ) -> None:
        """`lag` is n g; `recorded` has each step's next index and pass rates."""
        self._config = config
        self._lag = lag
        self._ends: list[int] = []
        self._known: dict[str, list[tuple[int, float]]] = {}
        self._measured: dict[int, tuple[str, float]] = {}
        for next_index, rates in recorded:
            self._commit(next_index, rates)

    def measure(self, index: int, summary: GroupSummary) -> None:
        """Records the pass rate of judged group `index`, even if a filter drops it: filters drop solved prompts."""
        if rewards := summary.known_rewards:
            passed = sum(is_success(reward, at=self._config.success_at) for reward in rewards)
            self._measured[index] = summary.prompt_id, passed / len(rewards)

    def of_step(self, next_index: int) -> dict[str, float]:
        """Pass rates of the groups below `next_index`, for the record of the step that ends there. Choices know them from now on."""
        rates = dict(self._measured.pop(index) for index in sorted(self._measured) if index < next_index)
        self._commit(next_index, rates)
        return rates

    def wants(self, prompt_id: str, *, index: int, drawn: float) -> bool:
        """Whether group `index` may have this prompt; `drawn` is uniform in [0, 1)."""
        _, rate = self._last(prompt_id, index)
        is_drawn = rate is None or drawn < preference(rate, target=self._config.target)
        return is_drawn and not self.rests(prompt_id, index=index)

    def rests(self, prompt_id: str, *, index: int) -> bool:
        """Whether this prompt was solved less than `skip_solved_steps` steps before group `index`."""
        age, rate = self._last(prompt_id, index)
        return rate == 1 and age < self._config.skip_solved_steps

    def _last(self, prompt_id: str, index: int) -> tuple[int, float | None]:
        """(steps since the last measurement that group `index` knows, its pass rate). None: no measurement."""
        step = bisect_right(self._ends, index - self._lag)
        measured = self._known.get(prompt_id, [])  # thousands in a long run
        num_known = bisect_right(measured, step, key=itemgetter(0))
        return (step - measured[num_known - 1][0], measured[num_known - 1][1]) if num_known else (0, None)

    def _commit(self, next_index: int, rates: Mapping[str, float]) -> None:
        self._ends.append(next_index)
        for prompt_id, rate in rates.items():
            self._known.setdefault(prompt_id, []).append((len(self._ends), rate))


def preference(rate: float, *, target: float) -> float:
    """1 at the target, falling in a line to 0 at the farthest pass rate, and never below 0.1."""
    return max(_LEAST, 1 - abs(rate - target) / max(target, 1 - target))

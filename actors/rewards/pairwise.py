"""Reward by comparisons inside the group."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PositiveInt

from actors.rubrics.asking import Asking, ChatEndpoint, ChatJudge, Grades
from actors.rubrics.rubric import PairRubric
from actors.rubrics.turns import apart
from cluster.contracts.errors import ConfigError, DataError
from cluster.supervision.tasks import together


class Pairwise:
    """A completion's mean score over its opponents, in [0, 1]: 1 for a win, 1/2 for a tie, 0 for a loss.

    A language model compares each pair in both orders. A pair's score is the mean of both, so a model that prefers a position gives ties.
    Equal texts tie without a question. Components: `position_bias`, the mean score of the first position minus 1/2 (0 for a fair model, 1/2
    for one that always takes the first), None if no pair was asked; `tokens`, half the tokens of its pairs.
    If one pair fails, the whole group fails: a win rate over fewer opponents is on another scale than the others.
    Source: Zheng et al., "Judging LLM-as-a-Judge" (arXiv:2306.05685), on position bias and both orders
    """

    keeps_verdicts = True

    def __init__(
        self,
        *,
        rubric: str | None = None,
        endpoint: ChatEndpoint | None = None,
        server: str | None = None,
        opponents: PositiveInt | None = None,
        asking: Asking | None = None,
    ) -> None:
        """`rubric`, `endpoint`, `server` and `asking` are those of `llm_judge`, but the rubric has no criteria, and its slots are `{first}`
        and `{second}`. `opponents` is an even number of opponents for each completion, drawn with the seed of the group's first completion.
        None: all others."""
        if opponents is not None and opponents % 2:
            raise ConfigError(
                f"opponents={opponents} is odd, and not every group size allows that; use {opponents + 1}"
            )
        pairs = PairRubric() if rubric is None else PairRubric.read(rubric, field="rubric")
        self._rubric = self.identity = pairs.comparing
        self._asking = asking or Asking()
        self._chat = ChatJudge(self._rubric, self._asking, endpoint=endpoint, server=server)
        self._opponents = opponents

    async def __call__(
        self,
        *,
        all_messages: Sequence[Sequence[Mapping[str, Any]]],
        seeds: Sequence[int],
        columns: Mapping[str, Any],
        servers: Mapping[str, Sequence[str]],
    ) -> list[dict[str, float | None]]:
        if len(all_messages) < 2:
            raise DataError(
                "pairwise compares completions, and the group has one; raise buffer.trajectories_per_group, and "
                "evaluation.num_samples for held-out prompts"
            )

        prompt, texts = apart(all_messages, columns)

        async def ask(first: str, second: str) -> Grades:
            filled = {"first": first, "second": second}
            question = self._rubric.conversation(filled, prompt=prompt, columns=columns)
            return await self._chat.grades(question, seed=self._asking.seed, servers=servers)

        pairs = _pairs(len(texts), self._opponents, seed=seeds[0])
        # Keyed by texts: equal completions are asked about once and get equal verdicts.
        orders = {(texts[i], texts[j]) for pair in pairs for i, j in (pair, pair[::-1]) if texts[i] != texts[j]}
        asked = sorted(orders)
        answers = dict(zip(asked, await together(*(ask(*order) for order in asked)), strict=True))
        return [_of_one(i, [pair for pair in pairs if i in pair], texts, answers) for i in range(len(texts))]


def _of_one(
    place: int, pairs: Sequence[tuple[int, int]], texts: Sequence[str], answers: Mapping[tuple[str, str], Grades]
) -> dict[str, float | None]:
    scores, first_wins, num_tokens = list[float](), list[float](), 0
    for i, j in pairs:
        own, other = (texts[i], texts[j]) if i == place else (texts[j], texts[i])
        if own == other:
            scores.append(0.5)
            continue
        before, after = answers[own, other], answers[other, own]
        wins = [before.values["better"], 1 - after.values["better"]]
        scores.append(sum(wins) / 2)
        first_wins += [before.values["better"], after.values["better"]]
        num_tokens += before.num_tokens + after.num_tokens
    bias = math.fsum(first_wins) / len(first_wins) - 0.5 if first_wins else None
    return {"reward": math.fsum(scores) / len(scores), "position_bias": bias, "tokens": num_tokens / 2}


def _pairs(size: int, opponents: int | None, *, seed: int) -> list[tuple[int, int]]:
    """All pairs, or pairs of neighbours on a shuffled circle, so that every completion is in the same number of pairs."""
    if opponents is None or opponents >= size - 1:
        return [*itertools.combinations(range(size), 2)]
    circle = random.Random(seed).sample(range(size), size)
    return [(circle[at], circle[(at + step) % size]) for step in range(1, opponents // 2 + 1) for at in range(size)]


pairwise = Pairwise

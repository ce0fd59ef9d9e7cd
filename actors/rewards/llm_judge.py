"""Reward by a language model that grades with a rubric."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pydantic import PositiveInt

from actors.rubrics.asking import Asking, ChatEndpoint, ChatJudge, prompt_text
from actors.rubrics.rubric import Rubric
from cluster.contracts.errors import ConfigError
from cluster.supervision.tasks import together


class LlmJudge:
    """Sum over the criteria of weight times the value of the chosen answer. With several votes, each criterion's median counts.

    Asks a server with OpenAI's API: `endpoint` (`{urls, model, key_env, ...}`), or `server`, a name of `reward.servers`. Answers are JSON
    in the rubric's form, which a server with structured outputs enforces. After an unreadable or cut-off answer the model is asked once
    more. If that fails too, or if one of several votes fails, the reward fails. Components: each criterion; `tokens` of all questions and
    answers; `votes_spread`, the largest reward of a vote minus the smallest. Source: Zheng et al., "Judging LLM-as-a-Judge"
    (arXiv:2306.05685)
    """

    keeps_verdicts = True

    def __init__(
        self,
        *,
        rubric: str,
        endpoint: ChatEndpoint | None = None,
        server: str | None = None,
        votes: PositiveInt = 1,
        asking: Asking | None = None,
    ) -> None:
        """`rubric` is a YAML file (docs/rewards.md). `asking` is `{temperature, max_tokens, seed, body}`. Vote i uses seed + i."""
        asking = asking or Asking()
        if votes > 1 and asking.temperature == 0:
            raise ConfigError(
                f"votes={votes} with asking.temperature=0: all votes are the same; raise the temperature, or leave votes out"
            )
        self._rubric = Rubric.read(rubric, field="rubric")
        self.identity = self._rubric
        self._chat = ChatJudge(self._rubric, asking, endpoint=endpoint, server=server)
        self._seeds = [asking.seed + vote for vote in range(votes)]

    async def __call__(
        self, *, messages: Sequence[Mapping[str, Any]], columns: Mapping[str, Any], servers: Mapping[str, Sequence[str]]
    ) -> dict[str, float]:
        texts = {"completion": str(messages[-1]["content"])}
        question = self._rubric.conversation(texts, prompt=prompt_text(messages), columns=columns)
        votes = await together(*(self._chat.grades(question, seed=seed, servers=servers) for seed in self._seeds))
        grades = {each.name: median(vote.values[each.name] for vote in votes) for each in self._rubric.criteria}
        rewards = [self._reward(vote.values) for vote in votes]
        spread = {"votes_spread": max(rewards) - min(rewards)} if len(votes) > 1 else {}
        num_tokens = sum(vote.num_tokens for vote in votes)
        return {"reward": self._reward(grades), "tokens": float(num_tokens), **grades, **spread}

    def _reward(self, grades: Mapping[str, float]) -> float:
        return math.fsum(each.weight * grades[each.name] for each in self._rubric.criteria)


llm_judge = LlmJudge

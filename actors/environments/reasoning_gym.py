"""A reasoning_gym task with several attempts (`actors.prompts.reasoning_gym`): after a wrong answer the model may try again."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from actors.reasoning import after_reasoning
from actors.rewards.reasoning_gym import answer_of, score_of
from cluster.contracts.episodes import Episode
from cluster.contracts.errors import EpisodeOver

_RIGHT = 1.0
"""The verifiers' highest score. It ends the episode."""
_WRONG = "That is not right. Try again."


async def reasoning_gym(
    episode: Episode,
    *,
    attempts: PositiveInt = 3,
    discount: Annotated[float, Field(gt=0, le=1)] = 0.8,
    counts: Literal["best", "last"] = "best",
    answer_tag: str | None = None,
) -> float:
    """The score of the best or the last attempt, times `discount` for each attempt before it. Verifier and `answer_tag` are those of the
    judge of the same name: without a tag the whole reply is the answer, with one the text in the last such tag.

    The model is not told how close an answer was. An episode that meets a limit has the score of its attempts so far.
    """
    scores: list[float] = []
    feedback = None
    while len(scores) < attempts and (not scores or scores[-1] < _RIGHT):
        try:
            said = await episode.ask(feedback)
        except EpisodeOver:
            if not scores:
                raise
            break
        answer = answer_of(after_reasoning(said.text), answer_tag=answer_tag)
        scores.append(score_of(answer, episode.columns, setting="environment"))
        feedback = _WRONG if answer is not None else f"Put your answer into <{answer_tag}>...</{answer_tag}>."
    episode.log("attempts", len(scores))
    episode.log("first_score", scores[0])
    discounted = [score * discount**number for number, score in enumerate(scores)]
    return max(discounted) if counts == "best" else discounted[-1]

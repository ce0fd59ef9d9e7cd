"""Penalty for a completion that repeats itself."""

from typing import Annotated

from pydantic import Field


def ngram_repetition(*, completion: str, n: Annotated[int, Field(ge=1)] = 3) -> float:
    """Minus the share of the completion's word n-grams that occur earlier in it: 0 without repetition, near -1 for one endless phrase.

    0 for fewer than n words. Source: the repetition penalty of Yeo et al., arXiv:2502.03373. Peers: open-r1
    `get_repetition_penalty_reward` (there scaled by `max_penalty`, here by the part's weight)
    """
    words = completion.lower().split()
    ngrams = [*zip(*(words[start:] for start in range(n)), strict=False)]
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0

"""Scores of held-out prompts: means with standard errors, pass@k, and means by source.

The completions of a prompt are not independent, so each error is that of a mean over prompts as clusters (Miller, arXiv:2411.00640). Rows
with the same prompt are one cluster.
"""

import math
from collections.abc import Mapping, Sequence

from cluster.contracts.types import GroupSummary, is_success, mean_of

NAN = float("nan")


def scores(
    summaries: Sequence[GroupSummary],
    *,
    success_at: float,
    num_samples: int,
    sources: Mapping[str, str],
    words: Mapping[str, str],
) -> dict[str, float]:
    """Metrics of one evaluation. Failed rewards are left out.

    A completion succeeds if its reward reaches `success_at`. `sources` maps a group's id to its prompt's source. `words` maps it to the
    prompt's text: groups with the same text are one cluster, and a group without an entry is its own.
    """
    places: dict[str, list[int]] = {}
    for place, summary in enumerate(summaries):
        places.setdefault(words.get(summary.group_id, summary.group_id), []).append(place)

    def error_of(values_by_group: Sequence[Sequence[float]]) -> float:
        return standard_error(
            [[value for place in each for value in values_by_group[place]] for each in places.values()]
        )

    rewards_by_group = [list(summary.known_rewards) for summary in summaries]
    successes_by_group = [
        [float(is_success(value, at=success_at)) for value in rewards] for rewards in rewards_by_group
    ]
    found = {
        "eval/reward": _mean(rewards_by_group),
        "eval/reward_stderr": error_of(rewards_by_group),
        "eval/accuracy": _mean(successes_by_group),
        "eval/accuracy_stderr": error_of(successes_by_group),
    }
    for k in _values_of_k(num_samples):
        passes = [[pass_at_k(len(each), int(sum(each)), k)] if len(each) >= k else [] for each in successes_by_group]
        found |= {f"eval/pass_at_{k}": _mean(passes), f"eval/pass_at_{k}_stderr": error_of(passes)}
    for source in sorted(set(sources.values())):
        of_source = [place for place, summary in enumerate(summaries) if sources.get(summary.group_id) == source]
        found[f"eval/reward/{source}"] = _mean([rewards_by_group[place] for place in of_source])
        found[f"eval/accuracy/{source}"] = _mean([successes_by_group[place] for place in of_source])
    return found


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, include a success: 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of Chen et al. (arXiv:2107.03374). Needs k <= n.
    """
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def standard_error(values_by_prompt: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all values, with prompts as clusters; NaN for fewer than two prompts.

    sqrt(P/(P-1) Σ_p (Σ_i (x_pi - mean))²) / N. If all prompts have the same number of values, it is the standard deviation of the prompts'
    means (ddof 1) divided by sqrt(P).
    """
    clusters = [values for values in values_by_prompt if values]
    if len(clusters) < 2:
        return NAN
    mean, number = _mean(clusters), sum(map(len, clusters))
    # `hypot` is the root of the sum of squares, also where a square would overflow.
    spread = math.hypot(*(sum(value - mean for value in values) for values in clusters))
    return math.sqrt(len(clusters) / (len(clusters) - 1)) * (spread / number)


def _values_of_k(num_samples: int) -> list[int]:
    """1, the powers of 2 and the number itself; empty for one sample, whose pass@1 is the accuracy."""
    if num_samples == 1:
        return []
    return sorted({num_samples, *(2**power for power in range(num_samples.bit_length()))})


def _mean(values_by_prompt: Sequence[Sequence[float]]) -> float:
    values = [value for values in values_by_prompt for value in values]
    return mean_of(values) if values else NAN

"""Conversations of several turns, whole and cut into segments."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.contracts.schema import to_batch, with_columns
from tests.unit.learner.trajectories import VOCABULARY, make_group

PER_TOKEN = (
    *(
        "completion_token_ids",
        "loss_mask",
        "rollout_logprobs",
        "policy_versions",
        "reference_logprobs",
        "token_rewards",
    ),
    *("reference_top_ids", "reference_top_logprobs"),
)
"""Columns whose lists are cut, each in equal pieces a token."""


def segmented(*episodes: tuple[float, list[int]], **columns: Any) -> pa.RecordBatch:
    """A group of which each episode has a reward and the lengths of its segments; columns have a value a row."""
    places = [(sample, i, len(lengths)) for sample, (_, lengths) in enumerate(episodes) for i in range(len(lengths))]
    rows = make_group(
        0,
        rewards=[reward for reward, lengths in episodes for _ in lengths],
        lengths=[length for _, lengths in episodes for length in lengths],
        segment_index=[index for _, index, _ in places],
        num_segments=[size for _, _, size in places],
        **columns,
    )
    return with_columns(rows, sample_index=[sample for sample, _, _ in places])


def as_trajectories(segments: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows, each a trajectory of its own: what they would be if segments were not known."""
    num = segments.num_rows
    return with_columns(segments, segment_index=[0] * num, num_segments=[1] * num, sample_index=list(range(num)))


def conversations(index: int, *, seed: int, size: int = 4) -> pa.RecordBatch:
    """A group of up to four turns each, an answer of the environment behind every turn but the last. The first half earns by turns."""
    numbers = np.random.default_rng([seed, index])
    masks = [_mask(numbers) for _ in range(size)]
    rewards = numbers.normal(size=size).round(1).tolist()
    tokens = [numbers.integers(4, VOCABULARY, len(mask)).tolist() for mask in masks]
    draw = lambda mask: numbers.normal(-4.0, 0.5, len(mask)).tolist()
    return make_group(
        index,
        rewards=rewards,
        seed=seed,
        version=4,
        lengths=[len(mask) for mask in masks],
        completion_token_ids=tokens,
        loss_mask=masks,
        rollout_logprobs=[draw(mask) for mask in masks],
        reference_logprobs=[draw(mask) for mask in masks],
        reference_top_ids=[[(token + i) % VOCABULARY for token in own for i in (1, 2)] for own in tokens],
        reference_top_logprobs=[np.log([0.5, 0.3, 0.2] * len(mask)) for mask in masks],
        policy_versions=[numbers.integers(0, 5, len(mask)).tolist() for mask in masks],
        token_rewards=[*map(_earned, masks[: size // 2], rewards), *[None] * (size - size // 2)],
        finish_reason=[str(numbers.choice(["stop", "length"])) for _ in masks],
        reward_components=[[("format", float(numbers.normal())), ("right", float(numbers.normal()))] for _ in masks],
        info=[json.dumps({"difficulty": abs(float(numbers.normal()))})] * size,
    )  # fmt: skip


def cut(group: pa.RecordBatch, *, seed: int, drops_answers: bool = False) -> pa.RecordBatch:
    """Its trajectories, cut in front of some of their turns: what stood before is the prompt of the segment behind.

    `drops_answers` leaves the environment's answer in front of a cut to that prompt alone.
    """
    chosen = random.Random(seed)
    return to_batch([part for row in group.to_pylist() for part in _cut(row, chosen, drops_answers=drops_answers)])


def _cut(row: dict[str, Any], chosen: random.Random, *, drops_answers: bool) -> Iterator[dict[str, Any]]:
    mask = row["loss_mask"]
    turns = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
    starts = [0, *sorted(chosen.sample(turns, chosen.randint(0, len(turns))))]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(mask)], strict=True)):
        last = max(place for place in range(start, end) if mask[place]) + 1
        end = last if drops_answers and index < len(starts) - 1 else end
        yield row | {
            "segment_index": index,
            "num_segments": len(starts),
            "prompt_token_ids": [*row["prompt_token_ids"], *row["completion_token_ids"][:start]],
            "finish_reason": row["finish_reason"] if index == len(starts) - 1 else "stop",
            **{name: _between(row[name], start, end, length=len(mask)) for name in PER_TOKEN},
        }


def _between(values: list[Any] | None, start: int, end: int, *, length: int) -> list[Any] | None:
    if values is None:
        return None
    each = len(values) // length
    return values[start * each : end * each]


def _mask(numbers: np.random.Generator) -> list[bool]:
    mask = [True] * int(numbers.integers(1, 4))
    for _ in range(int(numbers.integers(0, 4))):
        mask += [False] * int(numbers.integers(1, 3)) + [True] * int(numbers.integers(1, 4))
    return mask


def _earned(mask: list[bool], reward: float) -> list[float]:
    """A half on the first token, the rest on the last one: a turn's, or an answer's that the turn before it earned."""
    earned = [0.0] * len(mask)
    earned[0] += reward / 2
    earned[-1] += reward / 2
    return earned

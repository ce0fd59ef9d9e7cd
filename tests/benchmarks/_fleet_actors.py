"""The actors of a simulated fleet: they sleep and do not look. A module of its own, so that a process of theirs imports no more."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from cluster.contracts.schema import added, columns_of, to_batch, with_columns
from cluster.contracts.types import Scores, Ticket

PER_GROUP = 4
TOKENS = 4096
"""Of a completion: so that a group is larger than what Ray sends along with an answer, as real ones are."""
MEAN_S, SIGMA = float(os.environ.get("FLEET_MEAN_S", "4")), 0.6
"""Of a group, log-normal: its longest completion decides."""
STRAGGLER_SHARE, STRAGGLER_FACTOR = 0.005, 10.0
"""Groups that take so many times as long."""


class Crowd:
    """Workers of one process."""

    def __init__(self) -> None:
        self._batches: dict[int, pa.RecordBatch] = {}
        """By policy version."""

    async def generate(self, tickets: Sequence[Ticket]) -> AsyncIterator[pa.RecordBatch]:
        tasks = [asyncio.create_task(self._group(ticket)) for ticket in tickets]
        for task in asyncio.as_completed(tasks):
            yield await task

    async def abort(self, group_ids: Sequence[str]) -> list[str]:
        """A straggler goes on to its end, when nobody wants it any more."""
        return []

    async def _group(self, ticket: Ticket) -> pa.RecordBatch:
        await asyncio.sleep(sampling_s(ticket.seed))
        version = ticket.policy_version
        if version not in self._batches:
            self._batches = {version: to_batch([_row(sample, version) for sample in range(PER_GROUP)])}
        return with_columns(
            self._batches[version],
            group_id=[ticket.group_id] * PER_GROUP,
            ticket_index=[ticket.index] * PER_GROUP,
            prompt_id=[ticket.prompt.prompt_id] * PER_GROUP,
        )


class Judge:
    """A reward service that does not look."""

    async def score_several(self, asked: list[tuple[int, Sequence[Scores]]], *batches: pa.RecordBatch) -> list[Any]:
        scored = map(self._score, batches)
        return [(number, (columns, added(columns))) for (number, _), columns in zip(asked, scored, strict=True)]

    def _score(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        size = batch.num_rows
        return columns_of(
            batch,
            reward=[1.0] * size,
            reward_status=["ok"] * size,
            reward_components=[[]] * size,
            reward_message=[None] * size,
        )


def sampling_s(seed: int) -> float:
    """Of the group whose ticket has this seed."""
    dice = random.Random(seed)
    factor = STRAGGLER_FACTOR if dice.random() < STRAGGLER_SHARE else 1.0
    return factor * MEAN_S * dice.lognormvariate(-(SIGMA**2) / 2, SIGMA)


def _row(sample: int, version: int) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "run_id": "fleet",
        "group_id": "00000000",
        "ticket_index": 0,
        "sample_index": sample,
        "prompt_id": "0",
        "prompt_token_ids": [1] * 32,
        "completion_token_ids": [2] * TOKENS,
        "loss_mask": [True] * TOKENS,
        "rollout_logprobs": [-1.0] * TOKENS,
        "policy_versions": [version] * TOKENS,
        "reward_components": {},
        "finish_reason": "stop",
        "prompt_text": "a prompt",
        "completion_text": "a completion",
        "info": "{}",
        "worker": "rollout-0",
        "started_at": now,
        "finished_at": now,
        "seed": sample,
    }

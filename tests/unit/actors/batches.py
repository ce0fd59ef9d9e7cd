"""Trajectory batches for the scorers' tests."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from cluster.contracts.schema import to_batch


def batch_of(completions: Sequence[str], *, columns: dict[str, Any] | None = None) -> pa.RecordBatch:
    """One group with these texts; completion i has i + 1 tokens, the prompt is the tokens 1 and 2."""
    return to_batch([_row(index, text, columns or {}) for index, text in enumerate(completions)])


def _row(index: int, text: str, columns: dict[str, Any]) -> dict[str, Any]:
    num_tokens = index + 1
    return {
        "run_id": "run",
        "group_id": "00000000",
        "ticket_index": 0,
        "sample_index": index,
        "prompt_id": "p0",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3 + index] * num_tokens,
        "loss_mask": [True] * num_tokens,
        "rollout_logprobs": [-0.5] * num_tokens,
        "policy_versions": [0] * num_tokens,
        "reward_components": [],
        "finish_reason": "stop",
        "prompt_text": "say it",
        "completion_text": text,
        "info": json.dumps(columns),
        "worker": "rollout_worker-0",
        "started_at": datetime.now(UTC),
        "finished_at": datetime.now(UTC),
        "seed": index,
    }

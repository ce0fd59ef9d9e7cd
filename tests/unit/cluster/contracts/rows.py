"""One valid trajectory row, to be broken on purpose."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from cluster.contracts.schema import SCHEMA, to_batch


def row(**changed: Any) -> dict[str, Any]:
    """Two prompt tokens, three completion tokens, reward 1."""
    return {
        "run_id": "run",
        "group_id": "00000007",
        "ticket_index": 7,
        "sample_index": 0,
        "prompt_id": "p/7",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "loss_mask": [True, True, True],
        "rollout_logprobs": [-0.5, -1.0, -1.5],
        "policy_versions": [2, 2, 3],
        "reward": 1.0,
        "reward_status": "ok",
        "reward_components": {},
        "finish_reason": "stop",
        "prompt_text": "1+1=",
        "completion_text": "2",
        "info": "{}",
        "worker": "rollout-0",
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "finished_at": datetime(2026, 1, 1, tzinfo=UTC),
        "seed": 11,
        **changed,
    }


def before(*rows: dict[str, Any]) -> pa.RecordBatch:
    """A batch as schema 2 has it, which knew no segments."""
    later = ["routed_experts", "segment_index", "num_segments", "turns", "messages", "environment", "failed_stage"]
    kept = to_batch(rows).select([name for name in SCHEMA.names if name not in later])
    return kept.replace_schema_metadata({"treadwheel.schema_version": "2"})

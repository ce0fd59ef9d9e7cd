"""What learner tests are made of: run configurations of a tiny model, and Arrow groups whose tokens are drawn from a seed."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.contracts.config import RunConfig
from cluster.contracts.schema import to_batch, with_columns

VOCABULARY = 128


def make_config(model_path: Path, *, dtype: str = "float32", **sections: Any) -> RunConfig:
    sections.setdefault("optimizer", {"learning_rate": 1e-3})
    return RunConfig.model_validate(
        {"model": {"path": str(model_path), "dtype": dtype}, "prompts": "file", "num_steps": 10, **sections}
    )


def make_group(
    index: int,
    *,
    rewards: Sequence[float | None] = (1.0, 0.0, 0.5),
    seed: int = 0,
    prompt_length: int = 5,
    max_length: int = 9,
    lengths: Sequence[int] = (),
    version: int = 0,
    **columns: Sequence[Any],
) -> pa.RecordBatch:
    """One group with a trajectory per reward; None is a reward that failed. Tokens, and lengths not given, follow from seed and index."""
    random = np.random.default_rng([seed, index])
    prompt = random.integers(4, VOCABULARY, prompt_length).tolist()
    rows: list[dict[str, Any]] = []
    for sample, reward in enumerate(rewards):
        length = lengths[sample] if lengths else int(random.integers(1, max_length + 1))
        now = datetime(2026, 1, 1, tzinfo=UTC)
        row = {
            "run_id": "test",
            "group_id": f"{index:08d}",
            "ticket_index": index,
            "sample_index": sample,
            "prompt_id": f"prompt-{index}",
            "prompt_token_ids": prompt,
            "completion_token_ids": random.integers(4, VOCABULARY, length).tolist(),
            "loss_mask": [True] * length,
            "rollout_logprobs": random.normal(-4.0, 0.3, length).tolist(),
            "policy_versions": [version] * length,
            "reward": reward,
            "reward_status": "error" if reward is None else "ok",
            "reward_components": {},
            "finish_reason": "stop",
            "prompt_text": "",
            "completion_text": "",
            "info": "{}",
            "worker": "test",
            "started_at": now,
            "finished_at": now,
            "seed": sample,
        }
        rows.append(row | {name: values[sample] for name, values in columns.items()})
    return to_batch(rows)


def with_partition(group: pa.RecordBatch) -> pa.RecordBatch:
    """As if a reference found the two tokens behind each completion token likeliest, with 0.5 and 0.3; all others have 0.2."""
    completions = group["completion_token_ids"].to_pylist()
    return with_columns(
        group,
        reference_logprobs=[[-4.0] * len(tokens) for tokens in completions],
        reference_top_ids=[[(token + i) % VOCABULARY for token in tokens for i in (1, 2)] for tokens in completions],
        reference_top_logprobs=[np.log([0.5, 0.3, 0.2] * len(tokens)) for tokens in completions],
    )


def make_overflowing_group(index: int) -> pa.RecordBatch:
    """Its loss is not finite under `importance_sampling`: π/μ overflows where the rollout claims a log-prob of -1e5."""
    return make_group(index, rewards=(1.0, 0.0), max_length=1, rollout_logprobs=([-1e5], [-1e5]))


def make_unbounded_config(model_path: Path, *, max_skipped: int, **learner: Any) -> RunConfig:
    """Of a learner whose loss overflows on such groups, and that skips so many updates in a row."""
    return make_config(
        model_path,
        learner={"max_non_finite_updates": max_skipped, **learner},
        algorithm={"policy_loss": "importance_sampling"},
        checkpoint={"asynchronous": False},
    )

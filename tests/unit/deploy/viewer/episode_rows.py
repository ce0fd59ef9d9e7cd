"""An episode as the recorder leaves it: four turns in two segments, tools and a user between them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.unit.cluster.contracts.rows import row

HOSTILE = "<img src=x onerror=alert(1)>{{7*7}}"
REWRITTEN = f"Summary of what was said: 47 is there. {HOSTILE}"
"""What the second segment goes on from."""
Part = tuple[str, str, float]
"""What was said, the finish reason or "" where it was written, and what it earned."""
FIRST: Sequence[Part] = [("call add", "stop", 0.5), ("85 error", "", 0.0), ("so 85", "stop", 0.0)]
SECOND: Sequence[Part] = [("think on", "length", -0.25), ("go on please", "", 0.0), ("85", "stop", 1.0)]


def call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES: Sequence[Sequence[dict[str, Any]]] = (
    [
        {"role": "user", "content": "What is 47 + 38?"},
        {
            "role": "assistant",
            "content": "call",
            "tool_calls": [call("add", {"a": 47, "b": 38}, "c1"), call(HOSTILE, '{"a": 47', "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "85"},
        {"role": "tool", "tool_call_id": "c2", "content": "error"},
        {"role": "assistant", "content": "so 85"},
    ],
    [
        {"role": "assistant", "content": "47 is there"},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": "think on"},
        {"role": "user", "content": "go on please"},
        {"role": "assistant", "content": "85"},
    ],
)


def episode_rows(encode: Callable[[str], list[int]], **changed: Any) -> list[dict[str, Any]]:
    """A row a segment. `changed` is of both."""
    both = {
        "num_segments": 2,
        "environment": "sums",
        "episode": json.dumps({"num_calls": 2, "num_malformed_calls": 1, "num_uncanonical_turns": None, "log": {}}),
        "failed_stage": "tool:add",
        **changed,
    }
    return [
        row(**{
            **both,
            **_tokens(encode, parts),
            "segment_index": index,
            "messages": json.dumps(MESSAGES[index]),
            **({"prompt_text": REWRITTEN, "prompt_token_ids": encode(REWRITTEN)} if index else {}),
        })
        for index, parts in enumerate((FIRST, SECOND))
    ]  # fmt: skip


def _tokens(encode: Callable[[str], list[int]], parts: Sequence[Part]) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[bool] = []
    rewards: list[float] = []
    turns: list[dict[str, Any]] = []
    for text, finish_reason, earned in parts:
        start, new = len(ids), encode(text)
        ids += new
        mask += [bool(finish_reason)] * len(new)
        rewards += [*[0.0] * (len(new) - 1), earned]
        if finish_reason:
            turns.append({"start": start, "end": len(ids), "finish_reason": finish_reason})
    return {
        "completion_token_ids": ids,
        "completion_text": "".join(text for text, _, _ in parts),
        "loss_mask": mask,
        "rollout_logprobs": [-0.25 * (1 + at % 8) if sampled else 0.0 for at, sampled in enumerate(mask)],
        "policy_versions": [3] * len(ids),
        "token_rewards": rewards,
        "turns": turns,
        "finish_reason": "stop",
    }

"""The model's answer in the format of OpenAI's API: whole, or as the pieces of a stream."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cluster.contracts.episodes import Said, ToolCall
from cluster.contracts.types import FinishReason


def with_ids(said: Said) -> tuple[Said, set[str]]:
    """The same answer with an id for each call, and the set of ids that were generated here."""
    made: set[str] = set()

    def named(call: ToolCall) -> ToolCall:
        if call.id is not None:
            return call
        made.add(id := f"call_{secrets.token_hex(12)}")
        return replace(call, id=id)

    return replace(said, tool_calls=tuple(map(named, said.tool_calls))), made


def whole(said: Said, *, model: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": said.text or (None if said.tool_calls else "")}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [_call(call) for call in said.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(said)}
    return {**_head(model, "chatcmpl", "chat.completion"), "choices": [choice], "usage": _usage(said)}


def pieces(said: Said, *, model: str, with_usage: bool) -> Iterator[bytes]:
    """The pieces of a stream: the text, each call, the end."""
    head = _head(model, "chatcmpl", "chat.completion.chunk")

    def piece(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**head, "choices": [choice]})

    reasoning = {} if said.reasoning is None else {"reasoning_content": said.reasoning}
    yield piece({"role": "assistant", "content": said.text, **reasoning})
    for index, call in enumerate(said.tool_calls):
        yield piece({"tool_calls": [{"index": index, **_call(call)}]})
    yield piece({}, _finish_reason(said))
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(said)})
    yield b"data: [DONE]\n\n"


def raw_whole(said: Said, *, model: str, with_token_ids: bool) -> dict[str, Any]:
    """The answer to a raw prompt."""
    ids = {"prompt_token_ids": said.prompt_token_ids, "token_ids": said.token_ids} if with_token_ids else {}
    choice = {"index": 0, "text": said.text, "logprobs": None, "finish_reason": _finish_reason(said), **ids}
    return {**_head(model, "cmpl", "text_completion"), "choices": [choice], "usage": _usage(said)}


def raw_pieces(said: Said, *, model: str, with_token_ids: bool, with_usage: bool) -> Iterator[bytes]:
    """The pieces of a stream: the whole answer in one piece, then the usage."""
    answer = raw_whole(said, model=model, with_token_ids=with_token_ids)
    usage = answer.pop("usage")
    yield _event(answer)
    if with_usage:
        yield _event({**answer, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _head(model: str, prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _finish_reason(said: Said) -> str:
    if said.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if said.tool_calls else "stop"


def _usage(said: Said) -> dict[str, int]:
    """`num_context_tokens` includes the answer."""
    return {
        "prompt_tokens": max(said.num_context_tokens - said.num_tokens, 0),
        "completion_tokens": said.num_tokens,
        "total_tokens": max(said.num_context_tokens, said.num_tokens),
    }

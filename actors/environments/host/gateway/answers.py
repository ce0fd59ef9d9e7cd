"""The model's answer in the format of OpenAI's API: whole, or as the pieces of a stream."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from actors.environments.host.gateway.requests import ChatRequest, RawRequest
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


def whole(said: Said, request: ChatRequest | RawRequest) -> dict[str, Any]:
    answer = _raw(said, request) if isinstance(request, RawRequest) else _chat(said, request)
    return {**answer, "usage": _usage(said)}


def pieces(said: Said, request: ChatRequest | RawRequest) -> Iterator[bytes]:
    """The pieces of a stream. Of a chat: the text, each call, the end. After a raw prompt: the whole answer. Then the usage, if the request
    wants it."""
    if isinstance(request, RawRequest):
        head = _raw(said, request)
        yield _event(head)
    else:
        head = _head(request, "chatcmpl", "chat.completion.chunk")
        for delta, finish_reason in _deltas(said):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            yield _event({**head, "choices": [choice]})
    if request.wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(said)})
    yield b"data: [DONE]\n\n"


def _chat(said: Said, request: ChatRequest) -> dict[str, Any]:
    message = {"role": "assistant", "content": said.text or (None if said.tool_calls else "")}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [_call(call) for call in said.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(said)}
    return {**_head(request, "chatcmpl", "chat.completion"), "choices": [choice]}


def _deltas(said: Said) -> Iterator[tuple[dict[str, Any], str | None]]:
    reasoning = {} if said.reasoning is None else {"reasoning_content": said.reasoning}
    yield {"role": "assistant", "content": said.text, **reasoning}, None
    for index, call in enumerate(said.tool_calls):
        yield {"tool_calls": [{"index": index, **_call(call)}]}, None
    yield {}, _finish_reason(said)


def _raw(said: Said, request: RawRequest) -> dict[str, Any]:
    ids = {"prompt_token_ids": said.prompt_token_ids, "token_ids": said.token_ids} if request.wants_token_ids else {}
    choice = {"index": 0, "text": said.text, "logprobs": None, "finish_reason": _finish_reason(said), **ids}
    return {**_head(request, "cmpl", "text_completion"), "choices": [choice]}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _head(request: ChatRequest | RawRequest, prefix: str, kind: str) -> dict[str, Any]:
    id = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": request.model}


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

"""Compares an agent's messages with the context: they extend it, or are another history."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actors.environments.host.gateway.requests import arguments_of
from cluster.contracts.episodes import Message


def added_to(context: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """The messages that follow the context. None if they do not begin with it, or if the agent added an answer of its own."""
    before, added = messages[: len(context)], tuple(messages[len(context) :])
    if [*map(_comparable, before)] != [*map(_comparable, context)]:
        return None
    return None if any(message["role"] == "assistant" for message in added) else added


def without_ids(messages: Sequence[Message], ids: Collection[str]) -> tuple[Message, ...]:
    """The messages without these call ids, for a model whose calls have none."""
    return tuple(_without(message, ids) for message in messages)


def _without(message: Message, ids: Collection[str]) -> Message:
    kept = {name: value for name, value in message.items() if name != "tool_call_id" or value not in ids}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            {name: value for name, value in call.items() if name != "id" or value not in ids} for call in calls
        ]
    return kept


def _comparable(message: Message) -> Any:
    """Without the parts that frameworks drop or rewrite: ids, reasoning, names of tools, white space in JSON, None for an empty text."""
    calls = [_comparable_call(call) for call in message.get("tool_calls") or ()]
    name = message.get("name") if message["role"] != "tool" else None
    return message["role"], message.get("content") or "", name, calls


def _comparable_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function", call)
    return function.get("name"), arguments_of(function.get("arguments"))

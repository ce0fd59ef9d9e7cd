"""Tool calls as a chat template writes them: the text that the model is to sample."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.chat.after_turn import ASKED
from actors.chat.calls import ToolCall
from actors.chat.rendering import ChatTemplate, Tool
from cluster.contracts.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedTurn:
    prompt: str
    """What stands before the turn. Reasoning that the template itself writes at its beginning is part of it."""
    text: str
    """From the turn's first word to its stop token; to its end where the template writes none."""
    stop: str
    """That token; empty where there is none."""


def render_turn(
    template: ChatTemplate,
    calls: Sequence[ToolCall],
    *,
    tools: Sequence[Tool],
    stops: Sequence[str],
    content: str = "",
    arguments_as_text: bool,
) -> RenderedTurn:
    """Raises DataError for a template that does not take it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        arguments = [json.dumps(call.arguments) if arguments_as_text else call.arguments for call in calls]
        message["tool_calls"] = [
            {"type": "function", "id": f"call{index:05}", "function": {"name": call.name, "arguments": given}}
            for index, (call, given) in enumerate(zip(calls, arguments, strict=True))
        ]
    whole = template([ASKED, message], tools=tools)
    # A turn of other words begins in the same way, up to its words.
    start = num_common(whole, template([ASKED, {"role": "assistant", "content": "Zqsaid"}], tools=tools))
    # Nothing that it says or calls holds a stop token, so the first one ends the turn.
    end, stop = min(((at, stop) for stop in stops if (at := whole.find(stop, start)) >= 0), default=(len(whole), ""))
    return RenderedTurn(prompt=whole[:start], text=whole[start:end], stop=stop)


def wants_arguments_as_text(template: ChatTemplate, call: ToolCall, *, tools: Sequence[Tool]) -> bool:
    """Whether the template takes a call's arguments as JSON text alone; most take an object. Raises DataError when it takes neither."""
    options = {"tools": tools, "stops": ()}
    try:
        text = render_turn(template, [call], arguments_as_text=False, **options).text
    except DataError:
        render_turn(template, [call], arguments_as_text=True, **options)
        return True
    return repr(call.arguments) in text


def num_common(one: str, other: str) -> int:
    """Characters at the beginning that are the same."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def num_common_at_end(one: str, other: str) -> int:
    return num_common(one[::-1], other[::-1])

"""Tool calls as a chat template writes them: the text that the model should sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.chat.after_turn import ASKED
from actors.chat.calls import ToolCall
from actors.chat.rendering import ChatTemplate, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedTurn:
    prompt: str
    """The text before the turn, including reasoning that the template itself writes at the turn's beginning."""
    text: str
    """From the turn's first word to its stop token, or to the end if the template writes none."""
    stop: str
    """The stop token; empty if there is none."""


def render_turn(
    template: ChatTemplate,
    calls: Sequence[ToolCall],
    *,
    tools: Sequence[Tool],
    stops: Sequence[str],
    content: str = "",
) -> RenderedTurn:
    """Raises DataError if the template refuses the turn."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [replace(call, id=f"call{index:05}").as_json() for index, call in enumerate(calls)]
    whole = template([ASKED, message], tools=tools)
    # A turn with other words has the same text up to its words.
    start = num_common(whole, template([ASKED, {"role": "assistant", "content": "Zqsaid"}], tools=tools))
    # Neither content nor calls contain a stop token, so the first one ends the turn.
    end, stop = min(((at, stop) for stop in stops if (at := whole.find(stop, start)) >= 0), default=(len(whole), ""))
    return RenderedTurn(prompt=whole[:start], text=whole[start:end], stop=stop)


def num_common(one: str, other: str) -> int:
    """Length of the common beginning, in characters."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def num_common_at_end(one: str, other: str) -> int:
    return num_common(one[::-1], other[::-1])

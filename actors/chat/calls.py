"""Replies with tool calls: from the text that a model sampled to words, reasoning and calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from actors.chat.rendering import Tool, with_texts
from actors.writable import writable
from cluster.contracts.episodes import ToolCall
from cluster.contracts.errors import ConfigError, DataError, headline
from cluster.contracts.plugins import REPLY_PARSERS, Plugin, resolve

_OF_PARSING = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the parser raises: for broken JSON, for a call that lacks what is read of it, and for brackets within a thousand brackets."""
_MOST_LEVELS = 100
"""Of objects and lists within each other in a call. Pydantic writes 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An assistant's turn, read."""

    text: str
    """Without reasoning and calls."""
    reasoning: str | None = None
    """None where the model wrote none, or the parser knows none."""
    calls: tuple[ToolCall, ...] = ()
    """Arguments not yet held against the tools' schemas."""

    def as_message(self) -> dict[str, Any]:
        """As chat templates take it; what the model did not write as JSON stands in it as text."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return message


class ReplyParser(Protocol):
    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        """`sampled` and `prompt` with special tokens as they are written. Raises DataError for a malformed call."""
        ...


class TemplateParser:
    """transformers' parser with a response template: the tokenizer's own, or one made from its chat template."""

    def __init__(self, response_template: dict[str, Any]) -> None:
        self.response_template = response_template

    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        try:
            found = parse_response(sampled, self._loaded, prefix=prompt, tools=[dict(tool) for tool in tools])
        except _OF_PARSING as error:
            raise DataError(f"a tool call is malformed: {headline(error)}") from error
        return Reply(
            text=found.get("content") or "",
            reasoning=found.get("reasoning_content") or found.get("thinking"),
            calls=tuple(_call(each) for each in found.get("tool_calls") or ()),
        )

    @cached_property
    def _loaded(self) -> Any:
        """Its patterns, compiled once. Raises as the parser does for a template that it does not take."""
        return load_response_template(self.response_template)


class NamedParser:
    """A function below `actors.reply_parsers`, or of a user's, with its parameters bound."""

    def __init__(self, parser: Plugin) -> None:
        """Raises ConfigError if it is not there, or its parameters do not fit."""
        self._name = parser.name
        self._read = resolve(parser, home=REPLY_PARSERS, field="episodes.parser")

    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        """Raises ConfigError as the function does: no other reply would be read. Whatever else it raises makes this one malformed."""
        try:
            text, calls = self._read(text=sampled, tools=[dict(tool) for tool in tools])
            found = [{"function": call} for call in calls]
        except ConfigError:
            raise
        except Exception as error:  # foreign code
            raise DataError(f"a tool call is malformed: {headline(error)}") from error
        return Reply(text=str(text or ""), calls=tuple(map(_call, found)))


def _call(found: Any) -> ToolCall:
    function = found.get("function") if isinstance(found, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DataError(f"a tool call is malformed: it needs a name and an object of arguments, got {str(found)[:200]}")
    if _is_deep(arguments):
        raise DataError(f"a tool call is malformed: its arguments have more than {_MOST_LEVELS} levels")
    try:
        # Python's parser takes NaN and 1e999, which an agent's client could not read, and no later turn could show the model again.
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"a tool call is malformed: its arguments are not JSON: {error}") from error
    return ToolCall(name=writable(name), arguments=with_texts(arguments, writable))


def _is_deep(value: Any) -> bool:
    """By level, and not by recursion: it looks for what recursion does not take."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True

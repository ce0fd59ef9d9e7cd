"""Parse a sampled reply into text, reasoning and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from actors.chat.argument_types import with_types
from actors.chat.rendering import Tool, with_texts
from actors.reasoning import END_OF_THINK, parted
from actors.writable import writable
from cluster.contracts.episodes import ToolCall
from cluster.contracts.errors import ConfigError, DataError, headline
from cluster.contracts.plugins import REPLY_PARSERS, Plugin, resolve

_OF_PARSING = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of the parser: for broken JSON, for a call without a required field, and for a thousand nested brackets."""
_MOST_LEVELS = 100
"""Most nested objects and lists in a call. Pydantic serializes at most 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A parsed turn of the assistant."""

    text: str
    """Without reasoning and calls."""
    reasoning: str | None = None
    """None if the model wrote none, or the parser does not read it. Empty if the model closed it at once."""
    calls: tuple[ToolCall, ...] = ()
    """Arguments not yet checked against the tools' schemas."""

    def as_message(self) -> dict[str, Any]:
        """A message for chat templates. Arguments that are not JSON stay text."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return message


class ReplyParser(Protocol):
    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        """`sampled` and `prompt` include special tokens as text. Raises DataError for a malformed call."""
        ...


class TemplateParser:
    """transformers' parser with a response template: the tokenizer's own, or one made from its chat template."""

    def __init__(self, response_template: dict[str, Any]) -> None:
        self.response_template = response_template

    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        try:
            typed: list[Any] = [with_types(tool, keeps_texts=self._is_json) for tool in tools]
            found = parse_response(sampled, self._loaded, prefix=prompt, tools=typed)
        except _OF_PARSING as error:
            raise DataError(f"a tool call is malformed: {headline(error)}") from error
        text, reasoning = found.get("content") or "", found.get("reasoning_content") or found.get("thinking")
        # The parser leaves out empty reasoning, without which a judge takes the words of a cut off reply for thoughts.
        if reasoning is None and parted(sampled, prompt=prompt)[0] == "" and END_OF_THINK not in text:
            reasoning = ""
        return Reply(
            text=text,
            reasoning=reasoning,
            calls=tuple(_call(each) for each in found.get("tool_calls") or ()),
        )

    @cached_property
    def _loaded(self) -> Any:
        """The template's patterns, compiled once. Raises the parser's errors for an invalid template."""
        return load_response_template(self.response_template)

    @property
    def _is_json(self) -> bool:
        """Whether calls are JSON, which marks texts."""
        field = self._loaded.fields.get("tool_calls")
        return field is not None and field.content == "json"


class NamedParser:
    """A function below `actors.reply_parsers`, or a user's own, with its parameters bound."""

    def __init__(self, parser: Plugin) -> None:
        """Raises ConfigError if the function does not exist, or its parameters do not fit."""
        self._name = parser.name
        self._read = resolve(parser, home=REPLY_PARSERS, field="episodes.parser")

    def __call__(self, sampled: str, *, prompt: str, tools: Sequence[Tool]) -> Reply:
        """A ConfigError of the function passes through: it would refuse every reply. Any other exception of it is a malformed call."""
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
        # Python's parser accepts NaN and 1e999. An agent's client could not read them, and no later turn could show them to the model.
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"a tool call is malformed: its arguments are not JSON: {error}") from error
    return ToolCall(name=writable(name), arguments=with_texts(arguments, writable))


def _is_deep(value: Any) -> bool:
    """Walks level by level: recursion would fail on the depth that this looks for."""
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

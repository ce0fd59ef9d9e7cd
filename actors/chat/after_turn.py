"""The text after an assistant's turn: its close, new messages, and the beginning of the next turn, as the chat template writes them.

The template renders a dialogue in which the assistant says a unique word; the text is everything after that word. So sampled tokens are
never decoded and encoded again, and earlier turns stay as they were sampled, even where the template would rewrite them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from actors.chat.rendering import ChatTemplate, Message, Tool, fresh_word, texts
from cluster.contracts.errors import DataError

ASKED: Message = {"role": "user", "content": "Hi"}
"""Some templates require a user's message before the assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTurn:
    text: str
    close: str
    """The end of the turn: the beginning of `text` up to and including the first of the model's stop tokens. Some templates end a turn with
    the next role's tag. Empty if the template writes no stop token before the next message's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placeholders:
    """Unique placeholders, to find these texts in a rendering."""

    reply: str
    """The assistant's words, or an argument of its last call."""
    content: str
    """The content of the first new message."""
    tool: str
    """The names of tools."""


def after_turn(
    template: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Tool] = (), stops: Sequence[str]
) -> AfterTurn:
    """The text that new messages add after a turn. `stops`: the model's stop tokens as text.

    Messages of role `tool` name the call that they answer. If the template would show the tools again with the new messages, they are left
    out: the conversation's beginning already shows them. Raises DataError for messages that are not text, that the template refuses, or
    whose place after the turn cannot be found.
    """
    _refuse_unusual(messages)
    everything = "\n".join(texts([messages, tools, template.source]))
    placeholders = _Placeholders(**{name: fresh_word(f"Zq{name}", everything) for name in ("reply", "content", "tool")})
    problems: list[DataError] = []
    for dialogue in _dialogues(messages, placeholders.reply):
        try:
            return _split(template, dialogue, messages, tools=tools, stops=stops, placeholders=placeholders)
        except _ToolsShownAgain:
            return after_turn(template, messages, stops=stops)
        except DataError as error:
            problems.append(error)
    raise problems[0]


class _ToolsShownAgain(Exception):
    pass


def _split(
    template: ChatTemplate,
    dialogue: Sequence[Message],
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    stops: Sequence[str],
    placeholders: _Placeholders,
) -> AfterTurn:
    # A placeholder also replaces the first message's content, so that no content is mistaken for the turn's close.
    has_calls = "tool_calls" in dialogue[-1]
    what = "a tool call" if has_calls else "the assistant's words"
    outline = [*dialogue, {**messages[0], "content": placeholders.content}, *messages[1:]]
    after_outline = _only_after(
        placeholders.reply, template.outline(outline, tools=_named(tools, placeholders.tool)), what=what
    )
    before, found, _ = after_outline.partition(placeholders.content)
    if not found:
        raise not_exact(f"it does not write the content of a message of role {messages[0]['role']!r} after the turn")
    if placeholders.tool in after_outline:
        raise _ToolsShownAgain
    end = min((before.index(stop) + len(stop) for stop in stops if stop in before), default=0)
    start = 0
    if has_calls:
        start = _end_of_call(
            template, after_outline, outline, tools=tools, close=before[:end], stops=stops, placeholders=placeholders
        )
    after = _only_after(placeholders.reply, template.prompt([*dialogue, *messages], tools=tools), what=what)
    fixed = max(start, end)
    if after[:fixed] != before[:fixed]:
        raise not_exact("its close of a turn depends on the content of the next message")
    return AfterTurn(text=after[start:], close=before[start:end])


def _end_of_call(
    template: ChatTemplate,
    after_argument: str,
    outline: Sequence[Message],
    *,
    tools: Sequence[Tool],
    close: str,
    stops: Sequence[str],
    placeholders: _Placeholders,
) -> int:
    """How many characters of `after_argument` the model samples itself: all up to its stop token. Without a stop token: all that the
    template does not also write after a turn of words."""
    if close:
        return len(close) - max(len(stop) for stop in stops if close.endswith(stop))
    index = next(i for i, message in enumerate(outline) if message["role"] == "assistant")
    in_words = [*outline[:index], {"role": "assistant", "content": placeholders.reply}, *outline[index + 1 :]]
    rendered = template.outline(in_words, tools=_named(tools, placeholders.tool))
    after_words = _only_after(placeholders.reply, rendered, what="the assistant's words")
    if not after_argument.endswith(after_words):
        raise not_exact(
            "it writes none of the model's stop tokens after a tool call, so the call's end cannot be found"
        )
    return len(after_argument) - len(after_words)


def _dialogues(messages: Sequence[Message], reply: str) -> Iterator[list[Message]]:
    """Dialogues that end with the placeholder: as the assistant's reply or, before answers of tools, as an argument of its last call."""
    answers = [*takewhile(lambda message: message["role"] == "tool", messages)]
    if not answers:
        yield [ASKED, {"role": "assistant", "content": reply}]
        return
    arguments = [{"x": "1"}] * (len(answers) - 1) + [{"x": reply}]
    # Even if the template writes one call a turn, the model may have written several: their answers follow the last one.
    for num_calls in sorted({1, len(answers)}, reverse=True):
        for written in (dict, json.dumps):  # most templates want a call's arguments as an object, some as text
            paired = zip(answers[-num_calls:], arguments[-num_calls:], strict=True)
            calls = [_call(answer, written(each)) for answer, each in paired]
            yield [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]


def _call(answer: Message, arguments: Any) -> dict[str, Any]:
    function = {"name": answer.get("name", "tool"), "arguments": arguments}
    return {"type": "function", "id": answer.get("tool_call_id", "call00000"), "function": function}


def _named(tools: Sequence[Tool], name: str) -> list[Tool]:
    return [{**tool, "function": {**tool["function"], "name": name}} for tool in tools]


def _only_after(word: str, text: str, *, what: str) -> str:
    if (times := text.count(word)) != 1:
        raise not_exact(f"it writes {what} {times} times" if times else f"it does not write {what}")
    return text.partition(word)[2]


def _refuse_unusual(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("at least one message must follow a turn")
    if messages[0]["role"] == "assistant":
        raise DataError("the message after the assistant's turn is the assistant's, too; give one of another role")
    for message in messages:
        parts = message.get("content") if isinstance(message.get("content"), list) else ()
        for part in parts or ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                raise DataError(f"a message's content has a part of type {part['type']!r}; only text is supported")


def not_exact(why: str) -> DataError:
    """The error for a template that gives no exact text between turns."""
    return DataError(f"the chat template cannot continue after a turn: {why}; give another one (model.chat_template)")

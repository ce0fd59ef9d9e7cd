"""The text after an assistant's turn: its close, new messages, and the beginning of the next turn. The chat template itself writes it.

A dialogue is rendered in which the assistant said a word that nothing else says; what follows the word is the text. So what the model
sampled is never made text and tokens again, and earlier turns stay as they were sampled, whatever the template would do with them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from actors.chat.rendering import ChatTemplate, Message, Tool, fresh_word, texts
from cluster.contracts.errors import DataError

ASKED: Message = {"role": "user", "content": "Hi"}
"""Some templates want a user's message before the assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTurn:
    text: str
    close: str
    """The beginning of `text` up to the first of the model's stop tokens, this included: what ends a turn. Some templates end it with
    the next role's tag. Empty where the template writes no stop token before the next message's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """What stands for something in a rendering, so that its place can be found."""

    said: str
    told: str
    tool: str


def after_turn(
    template: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Tool] = (), stops: Sequence[str]
) -> AfterTurn:
    """The text that new messages add after a turn. `stops` are the model's stop tokens as they are written.

    Messages of role `tool` name the call that they answer. Tools that the template would show again with the new messages are left out:
    they stay where they first stood. Raises DataError for messages that are not text, that the template does not take, or whose place
    after the turn cannot be found.
    """
    _refuse_unusual(messages)
    everything = "\n".join(texts([messages, tools, template.source]))
    words = _Words(**{name: fresh_word(f"Zq{name}", everything) for name in ("said", "told", "tool")})
    problems: list[DataError] = []
    for dialogue in _dialogues(messages, words.said):
        try:
            return _split(template, dialogue, messages, tools=tools, stops=stops, words=words)
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
    words: _Words,
) -> AfterTurn:
    # A word stands for the first message's content, too, so that no content is mistaken for what comes before it.
    has_calls = "tool_calls" in dialogue[-1]
    what = "a tool call" if has_calls else "the assistant's words"
    outline = [*dialogue, {**messages[0], "content": words.told}, *messages[1:]]
    after_outline = _only_after(words.said, template.outline(outline, tools=_named(tools, words.tool)), what=what)
    before, is_told, _ = after_outline.partition(words.told)
    if not is_told:
        raise not_exact(f"it does not write the content of a message of role {messages[0]['role']!r} after the turn")
    if words.tool in after_outline:
        raise _ToolsShownAgain
    end = min((before.index(stop) + len(stop) for stop in stops if stop in before), default=0)
    start = 0
    if has_calls:
        start = _end_of_call(
            template, after_outline, outline, tools=tools, close=before[:end], stops=stops, words=words
        )
    after = _only_after(words.said, template.prompt([*dialogue, *messages], tools=tools), what=what)
    fixed = max(start, end)
    if after[:fixed] != before[:fixed]:
        raise not_exact("how it closes a turn depends on the content of the next message")
    return AfterTurn(text=after[start:], close=before[start:end])


def _end_of_call(
    template: ChatTemplate,
    after_argument: str,
    outline: Sequence[Message],
    *,
    tools: Sequence[Tool],
    close: str,
    stops: Sequence[str],
    words: _Words,
) -> int:
    """How much of `after_argument` the model samples itself: up to its stop token. Without one, all that does not follow a turn of words
    as well."""
    if close:
        return len(close) - max(len(stop) for stop in stops if close.endswith(stop))
    index = next(i for i, message in enumerate(outline) if message["role"] == "assistant")
    in_words = [*outline[:index], {"role": "assistant", "content": words.said}, *outline[index + 1 :]]
    rendered = template.outline(in_words, tools=_named(tools, words.tool))
    after_words = _only_after(words.said, rendered, what="the assistant's words")
    if not after_argument.endswith(after_words):
        raise not_exact(
            "it writes none of the model's stop tokens after a tool call, so the call's end cannot be found"
        )
    return len(after_argument) - len(after_words)


def _dialogues(messages: Sequence[Message], said: str) -> Iterator[list[Message]]:
    """Ways to say the word before these messages: as a reply or, where tools answer, as an argument of the last call."""
    answers = [*takewhile(lambda message: message["role"] == "tool", messages)]
    if not answers:
        yield [ASKED, {"role": "assistant", "content": said}]
        return
    arguments = [{"x": "1"}] * (len(answers) - 1) + [{"x": said}]
    # Where a template writes one call a turn, the model may have written several all the same: their answers follow the last one.
    for num_calls in sorted({1, len(answers)}, reverse=True):
        for written in (dict, json.dumps):  # most templates take a call's arguments as an object, some as text
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
        raise ValueError("after a turn comes at least one message")
    if messages[0]["role"] == "assistant":
        raise DataError("the message after the assistant's turn is the assistant's, too; give one of another role")
    for message in messages:
        parts = message.get("content") if isinstance(message.get("content"), list) else ()
        for part in parts or ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                raise DataError(f"a message's content has a part of type {part['type']!r}; only text is supported")


def not_exact(why: str) -> DataError:
    """The template gives no exact text between turns."""
    return DataError(f"the chat template cannot go on after a turn: {why}; give another one (model.chat_template)")

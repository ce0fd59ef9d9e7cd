"""A model's chat template as a function: messages in, text out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError

from actors.chat.kept import Kept
from cluster.contracts.errors import DataError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""A function's JSON schema, as OpenAI's interface writes it."""

_OF_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of templates: some refuse messages by name, others index, add or divide values that the messages lack."""


class ChatTemplate:
    """One tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.chat_template
        self.source: str = found if isinstance(found, str) else "\n".join((found or {}).values())
        """All templates together, if the tokenizer has another one for tools."""
        self._outlines: Kept[str] = Kept()
        self._wants_text: Kept[bool] = Kept()

    def __call__(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
        """Text that ends with the last message. Raises DataError for messages that the template refuses."""
        return self._rendered(messages, tools=tools, add_generation_prompt=False)

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
        """Text that ends where the assistant's turn begins. Raises DataError for messages that the template refuses."""
        return self._rendered(messages, tools=tools, add_generation_prompt=True)

    def outline(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
        """As `prompt`, cached: for messages with placeholders as contents, which repeat."""
        return self._outlines.of((messages, tools), lambda: self.prompt(messages, tools=tools))

    def wants_arguments_as_text(self, *, tools: Sequence[Tool] = ()) -> bool:
        """Whether it writes a call's arguments rightly only if they are JSON text. Most templates take an object."""
        return self._wants_text.of(tools, lambda: self._refuses_objects(tools))

    def _refuses_objects(self, tools: Sequence[Tool]) -> bool:
        arguments = {"zqkey": "zqvalue"}
        name = tools[0]["function"]["name"] if tools else "zqname"

        def written(arguments: Any) -> str | None:
            call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                return self._applied([{"role": "user", "content": "Hi"}, calling], tools=tools)
            except DataError:
                return None

        of_object = written(arguments)
        is_wrong = of_object is None or repr(arguments) in of_object
        return is_wrong and written(json.dumps(arguments)) is not None

    def _rendered(self, messages: Sequence[Message], *, tools: Sequence[Tool], add_generation_prompt: bool) -> str:
        """A call's arguments may be an object whatever the template takes."""
        as_text = any(each.get("tool_calls") for each in messages) and self.wants_arguments_as_text(tools=tools)
        return self._applied(messages, tools=tools, as_text=as_text, add_generation_prompt=add_generation_prompt)

    def _applied(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        as_text: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        options = {"tools": [*tools] or None, "add_generation_prompt": add_generation_prompt}
        try:
            given = [_with_arguments_as_text(each) for each in messages] if as_text else [*messages]
            text: str = self._tokenizer.apply_chat_template(given, tokenize=False, **options)
        except _OF_TEMPLATES as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the chat template does not take messages of these roles ({roles}): {type(error).__name__}: {error}; "
                "mend them, or the template (model.chat_template replaces the tokenizer's)"
            ) from error
        if why := _written_as_a_list(messages, text):
            raise DataError(f"a message {why}")
        return text


def _with_arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        given = call["function"].get("arguments")
        as_text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": as_text}})
    return {**message, "tool_calls": calls}


def _written_as_a_list(messages: Sequence[Message], text: str) -> str | None:
    """The reason why `text` misrepresents the messages: a template that expects contents as text may silently write a content of parts as
    Python writes a list. None if it does not."""
    for message in messages:
        content: object = message.get("content")
        if isinstance(content, list) and content and str(cast(object, content)) in text:
            return (
                f"has a content of parts, {str(cast(object, content))[:80]!r}, which the chat template writes as Python writes a list; "
                "give the content as one text"
            )
    return None


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, including keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {with_texts(key, change): with_texts(each, change) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [with_texts(each, change) for each in value]
    return value


def texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, including keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts(key)
            yield from texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts(each)


def fresh_word(word: str, value: Any) -> str:
    """`word`, extended until no text in `value` contains it. It has only letters, so no template trims, quotes or escapes it."""
    while any(word in text for text in texts(value)):
        word += "q" * len(word)  # one by one, a page of these letters would take hours
    return word

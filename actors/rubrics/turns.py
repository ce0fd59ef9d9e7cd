"""Conversations as text for a judging model. Only the prompt's own messages stand in the clear.

All other text stands between two marks that contain its hash, so it cannot forge them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from actors.writable import writable

Message = Mapping[str, Any]

_NEVER_THE_POLICYS = ("system", "user")
"""Roles that the policy cannot speak in. An environment can repeat the policy's words in them."""

_CONTROL = re.compile(
    r"<(?=[|\uff5c][^\s<>|\uff5c]+[|\uff5c]?>|[^\s<>|\uff5c]+[|\uff5c]>|(start|end)_of_turn>|/s>)"
    r"|\[(?=/?(INST|SYSTEM_PROMPT|TOOL_RESULTS)\])"
)
"""The first character of a control token of common chat templates. The judge's tokenizer is not known here."""


def marked(text: str) -> str:
    """A control token in the text would end the question: a space after its first character makes it ordinary text."""
    text = _CONTROL.sub(r"\g<0> ", text)
    mark = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"<text {mark}>\n{text}\n</text {mark}>"


def prompt_text(messages: Sequence[Message], columns: Mapping[str, Any]) -> str:
    """The only message's text, or all messages with their roles. Messages that are not the prompt's stand between marks."""
    is_clear = are_the_prompts(messages, columns)
    if is_clear == [True]:
        return _text(messages[0])
    return "\n\n".join(map(_shown, messages, is_clear))


def are_the_prompts(messages: Sequence[Message], columns: Mapping[str, Any]) -> list[bool]:
    """For each message whether it is one of the prompt's, which are its column `messages`.

    A prompt of text has no such column: then the messages before the first turn of assistant or tool count as the prompt's. An assistant's
    or tool's message is the prompt's only in its place: the policy could say the same.
    """
    own, said = _told(columns.get("messages") or ()), _told(messages)
    if not own:
        num_opening = _num_opening(messages)
        return [place < num_opening for place in range(len(messages))]
    begins = said[: len(own)] == own
    return [
        (begins and place < len(own)) or (each[0] in _NEVER_THE_POLICYS and each in own)
        for place, each in enumerate(said)
    ]


def apart(
    conversations: Sequence[Sequence[Message]], columns: Mapping[str, Any]
) -> tuple[Sequence[Message], list[str]]:
    """The messages to show once, and each conversation's own text.

    If all conversations are equal up to their answers, their last messages, and these call no tool, the texts are these answers. Else the
    prompt is shown once, and each text has all other messages, each between marks of its own: an answer cannot pretend to be a tool's
    message.
    """
    before = [[*messages[:-1]] for messages in conversations]
    are_equal = all(_told(each) == _told(before[0]) for each in before)
    if are_equal and not any(map(_calls, (messages[-1] for messages in conversations))):
        return before[0], [_text(messages[-1]) for messages in conversations]
    shared: Sequence[Message] = columns.get("messages") or _common([each[: _num_opening(each)] for each in before])
    own = _told(shared)
    rests = [each[len(own) if _told(each)[: len(own)] == own else 0 :] for each in conversations]
    return shared, ["\n\n".join(_shown(each, False) for each in rest) for rest in rests]


def _shown(message: Message, is_clear: bool) -> str:
    role, text, calls = message["role"], _text(message), _calls(message)
    said = [(role, text)] if text or not calls else []
    said += [(f"{role} calls", calls)] if calls else []
    return "\n\n".join(f"[{head}]\n{each if is_clear else marked(each)}" for head, each in said)


def _told(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    """The role, text and tool calls of each message."""
    return [(str(each["role"]), _text(each), _calls(each)) for each in messages]


def _text(message: Message) -> str:
    """The content as text. A part without text, such as an image, is named by its type."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(map(_part, content))
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"


def _calls(message: Message) -> str:
    """The message's tool calls as JSON, one a line. Empty if it has none."""
    calls = message.get("tool_calls") or ()
    return "\n".join(writable(json.dumps(each.get("function", each), ensure_ascii=False)) for each in calls)


def _num_opening(messages: Sequence[Message]) -> int:
    return sum(1 for _ in takewhile(lambda each: each["role"] in _NEVER_THE_POLICYS, messages))


def _common(beginnings: Sequence[Sequence[Message]]) -> Sequence[Message]:
    """The messages with which all begin."""
    said = [*map(_told, beginnings)]
    num = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*said, strict=False)))
    return beginnings[0][:num]

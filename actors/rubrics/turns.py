"""Conversations as text for a judging model. Only the prompt's own messages stand in the clear.

All other text stands between two marks that contain its hash, so it cannot forge them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]

_NEVER_THE_POLICYS = ("system", "user")
"""Roles that the policy cannot speak in. An environment can repeat the policy's words in them."""


def marked(text: str) -> str:
    mark = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"<text {mark}>\n{text}\n</text {mark}>"


def prompt_text(messages: Sequence[Message], columns: Mapping[str, Any]) -> str:
    """The only message's text, or all messages with their roles. Messages that are not the prompt's stand between marks."""
    is_clear = are_the_prompts(messages, columns)
    if is_clear == [True]:
        return str(messages[0]["content"])
    return "\n\n".join(map(_shown, messages, is_clear))


def are_the_prompts(messages: Sequence[Message], columns: Mapping[str, Any]) -> list[bool]:
    """For each message whether it is one of the prompt's, which are its column `messages`.

    A prompt of text has no such column: then the messages before the first turn of assistant or tool count as the prompt's. An assistant's
    or tool's message is the prompt's only in its place: the policy could say the same.
    """
    own, said = _roles_and_texts(columns.get("messages") or ()), _roles_and_texts(messages)
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

    If all conversations are equal up to their answers, their last messages, the texts are these answers. Else the prompt is shown once,
    and each text has all other messages, each between marks of its own: an answer cannot pretend to be a tool's message.
    """
    before = [[*messages[:-1]] for messages in conversations]
    if all(_roles_and_texts(each) == _roles_and_texts(before[0]) for each in before):
        return before[0], [str(messages[-1]["content"]) for messages in conversations]
    shared: Sequence[Message] = columns.get("messages") or _common([each[: _num_opening(each)] for each in before])
    own = _roles_and_texts(shared)
    rests = [each[len(own) if _roles_and_texts(each)[: len(own)] == own else 0 :] for each in conversations]
    return shared, ["\n\n".join(_shown(each, False) for each in rest) for rest in rests]


def _shown(message: Message, is_clear: bool) -> str:
    text = str(message["content"])
    return f"[{message['role']}]\n{text if is_clear else marked(text)}"


def _roles_and_texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(str(each["role"]), str(each["content"])) for each in messages]


def _num_opening(messages: Sequence[Message]) -> int:
    return sum(1 for _ in takewhile(lambda each: each["role"] in _NEVER_THE_POLICYS, messages))


def _common(beginnings: Sequence[Sequence[Message]]) -> Sequence[Message]:
    """The messages with which all begin."""
    said = [*map(_roles_and_texts, beginnings)]
    num = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*said, strict=False)))
    return beginnings[0][:num]

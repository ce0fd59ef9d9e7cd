"""Ids of a rendering in which no text of a message or a tool's description becomes a control token."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from actors.chat.encoding import TextEncoder
from actors.chat.rendering import Message, Tool, fresh_word, texts, with_texts
from actors.reasoning import END_OF_THINK, THINK
from cluster.contracts.errors import DataError

_OWN = (THINK, END_OF_THINK)
_AROUND_OWN = re.compile(f"({THINK}|{END_OF_THINK})")


def foreign_ids(
    encoder: TextEncoder,
    text: str,
    render: Callable[[Sequence[Message], Sequence[Tool]], str],
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    begins: bool = False,
) -> list[int]:
    """Ids of `text`, which is `render(messages, tools)` by the encoder's chat template. It continues after other ids, unless it `begins` a
    conversation.

    A text that contains control tokens is cut inside each, and nowhere else; without any, the whole is encoded at once. The tags of
    reasoning in the assistant's words stay control tokens: templates look for them to leave earlier reasoning out. Raises DataError if
    control tokens in a text cannot be distinguished from the template's own.
    """
    encode = encoder.encode if begins else encoder.encode_on

    def changed(change: Callable[[str], str]) -> str:
        return render(_changed(messages, change), with_texts(tools, change))

    foreign: list[str] = [*texts(tools)]
    _changed(messages, lambda each: foreign.append(each) or each)
    if not any(map(encoder.may_begin_control, foreign)):
        return encode(text)
    # The template's own control tokens, in order: right ids have these and no others.
    own = encoder.control_ids(encode(changed(encoder.harmless)))
    if not any(map(encoder.writes_control, foreign)):
        token_ids = encode(text)
        if encoder.control_ids(token_ids) == own:
            return token_ids
    # Texts that the template joins can form a control token together. The second way cuts these, too.
    mark = fresh_word("Zqcut", [foreign, encoder.template])
    for cut in (encoder.cut_inside, encoder.cut_everywhere):
        first, *others = changed(lambda each, cut=cut: cut(each, mark)).split(mark)
        token_ids = [*encode(first), *encoder.encode_pieces(others)]
        if encoder.control_ids(token_ids) == own:
            return token_ids
    written = [control for control in encoder.controls if any(control in each for each in foreign)]
    raise DataError(
        f"a message or tool has control tokens ({', '.join(written)}) in its text that look like the chat template's own; take them out"
    )


def _changed(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    def changed(role: Any, name: str, value: Any) -> Any:
        if name == "role":
            return value
        if (role, name) == ("assistant", "content") and isinstance(value, str):
            return "".join(each if each in _OWN else change(each) for each in _AROUND_OWN.split(value))
        return with_texts(value, change)

    return [
        {name: changed(message.get("role"), name, value) for name, value in message.items()} for message in messages
    ]

"""Ids of a rendering in which no text of a message becomes a control token, whatever a user, a tool or a web page wrote."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from actors.chat.derivation import END_OF_THINK, THINK
from actors.chat.encoding import TextEncoder
from actors.chat.rendering import Message, fresh_word, with_texts
from cluster.contracts.errors import DataError

_OWN = (THINK, END_OF_THINK)
_AROUND_OWN = re.compile(f"({THINK}|{END_OF_THINK})")


def foreign_ids(
    encoder: TextEncoder,
    text: str,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    *,
    source: str,
    begins: bool = False,
) -> list[int]:
    """Of `text`, which is `render(messages)`, through the chat template of this `source`. It goes on where other ids end, unless it
    `begins` a conversation.

    A text that writes control tokens is cut inside each, and nowhere else; texts without any get the ids of the whole encoded at once.
    The tags of reasoning in what the assistant said are its own: templates look for them to leave earlier reasoning out. Raises DataError
    for control tokens in a text that cannot be told from the template's own.
    """
    encode = encoder.encode if begins else encoder.encode_on
    foreign: list[str] = []
    _changed(messages, lambda each: foreign.append(each) or each)
    if not any(map(encoder.may_begin_control, foreign)):
        return encode(text)
    # The template's own control tokens, in order: right ids have these and no others.
    own = encoder.control_ids(encode(render(_changed(messages, encoder.harmless))))
    if not any(map(encoder.writes_control, foreign)):
        token_ids = encode(text)
        if encoder.control_ids(token_ids) == own:
            return token_ids
    # Parts that a template joins can write a control token that none of them writes. The second way cuts these, too.
    mark = fresh_word("Zqcut", [foreign, source])
    for cut in (encoder.cut_inside, encoder.cut_everywhere):
        first, *others = render(_changed(messages, lambda each, cut=cut: cut(each, mark))).split(mark)
        token_ids = [*encode(first), *encoder.encode_pieces(others)]
        if encoder.control_ids(token_ids) == own:
            return token_ids
    written = [control for control in encoder.controls if any(control in each for each in foreign)]
    raise DataError(
        f"a message writes control tokens ({', '.join(written)}) that cannot be told from the chat template's own; take them out"
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

"""The ids after an assistant's turn, in which no text of a message becomes a control token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.chat.after_turn import after_turn, not_exact
from actors.chat.encoding import TextEncoder
from actors.chat.rendering import ChatTemplate, Message, Tool, fresh_word, texts, with_texts
from cluster.contracts.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """What follows the tokens that the model sampled."""

    text: str
    """The turn's close, the new messages, and the beginning of the next turn."""
    token_ids: list[int]
    close_ids: list[int]
    """The beginning of `token_ids` up to the model's stop token by which the template ends a turn; empty where it writes none."""


class SuffixWriter:
    """One model's suffixes. `stop_token_ids` end what the model samples."""

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, *, stop_token_ids: Sequence[int]) -> None:
        self._template = template
        self._encoder = encoder
        ends = {*stop_token_ids}
        self.stops: tuple[str, ...] = tuple(text for text, token_id in encoder.controls.items() if token_id in ends)
        """The stop tokens as they are written."""

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Suffix:
        """For new messages that follow an assistant's turn; those of role `tool` name the call that they answer.

        A text that writes control tokens is cut inside each, and nowhere else; texts without any get the ids of the whole suffix encoded
        at once. Raises DataError for messages that are not text or that the template does not take, for a template that gives no exact
        suffix, and for control tokens in a text that cannot be told from the template's own.
        """
        after = after_turn(self._template, messages, tools=tools, stops=self.stops)
        token_ids = self._token_ids(after.text, messages, tools=tools)
        close_ids = self._encoder.encode_on(after.close) if after.close else []
        if token_ids[: len(close_ids)] != close_ids:
            raise not_exact(f"the next message changes the tokens of the turn's close {after.close!r}")
        return Suffix(text=after.text, token_ids=token_ids, close_ids=close_ids)

    def _token_ids(self, text: str, messages: Sequence[Message], *, tools: Sequence[Tool]) -> list[int]:
        encoder = self._encoder
        foreign = [
            text for message in messages for name, value in message.items() if name != "role" for text in texts(value)
        ]
        if not any(map(encoder.may_begin_control, foreign)):
            return encoder.encode_on(text)
        # The template's own control tokens, in order: right ids have these and no others.
        harmless = self._text(messages, encoder.harmless, tools=tools)
        own = encoder.control_ids(encoder.encode_on(harmless))
        if not any(map(encoder.writes_control, foreign)):
            token_ids = encoder.encode_on(text)
            if encoder.control_ids(token_ids) == own:
                return token_ids
        # Parts that a template joins can write a control token that none of them writes. The second way cuts these, too.
        mark = fresh_word("Zqcut", [foreign, self._template.source])
        for cut in (encoder.cut_inside, encoder.cut_everywhere):
            marked = self._text(messages, lambda each, cut=cut: cut(each, mark), tools=tools)
            token_ids = encoder.encode_pieces(marked.split(mark))
            if encoder.control_ids(token_ids) == own:
                return token_ids
        written = [control for control in encoder.controls if any(control in each for each in foreign)]
        raise DataError(
            f"a message writes control tokens ({', '.join(written)}) that cannot be told from the chat template's own; take them out"
        )

    def _text(self, messages: Sequence[Message], change: Callable[[str], str], *, tools: Sequence[Tool]) -> str:
        changed = [
            {name: value if name == "role" else with_texts(value, change) for name, value in message.items()}
            for message in messages
        ]
        return after_turn(self._template, changed, tools=tools, stops=self.stops).text

"""The ids after an assistant's turn, in which no text of a message becomes a control token."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.chat.after_turn import after_turn, not_exact
from actors.chat.encoding import TextEncoder
from actors.chat.foreign_text import foreign_ids
from actors.chat.kept import Kept
from actors.chat.rendering import ChatTemplate, Message, Tool


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
        self._close_ids: Kept[list[int]] = Kept()

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Suffix:
        """For new messages that follow an assistant's turn; those of role `tool` name the call that they answer.

        A text that writes control tokens is cut inside each, and nowhere else; texts without any get the ids of the whole suffix encoded
        at once. Raises DataError for messages that are not text or that the template does not take, for a template that gives no exact
        suffix, and for control tokens in a text that cannot be told from the template's own.
        """
        after = after_turn(self._template, messages, tools=tools, stops=self.stops)
        token_ids = self._token_ids(after.text, messages, tools=tools)
        close = after.close
        close_ids = self._close_ids.of(close, lambda: self._encoder.encode_on(close)) if close else []
        if token_ids[: len(close_ids)] != close_ids:
            raise not_exact(f"the next message changes the tokens of the turn's close {close!r}")
        return Suffix(text=after.text, token_ids=token_ids, close_ids=close_ids)

    def _token_ids(self, text: str, messages: Sequence[Message], *, tools: Sequence[Tool]) -> list[int]:
        def render(changed: Sequence[Message]) -> str:
            return after_turn(self._template, changed, tools=tools, stops=self.stops).text

        return foreign_ids(self._encoder, text, messages, render, source=self._template.source)

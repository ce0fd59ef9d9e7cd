"""Exact tokens from turn to turn: the next prompt is the last one, the tokens that the model sampled, and a suffix, in which no text of a
message becomes a control token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.chat.after_turn import after_turn, not_exact
from actors.chat.encoding import TextEncoder
from actors.chat.foreign_text import foreign_ids
from actors.chat.kept import Kept
from actors.chat.rendering import ChatTemplate, Message, Tool
from cluster.contracts.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """What follows the tokens that the model sampled."""

    text: str
    """The turn's close, the new messages, and the beginning of the next turn."""
    token_ids: list[int]
    close_ids: list[int]
    """The beginning of `token_ids` up to the model's stop token by which the template ends a turn; empty where it writes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    token_ids: list[int]
    num_written: int
    """Of them, those at the end that nobody sampled: the suffix without what the model sampled of it."""


class Turns:
    """One model's conversations."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: Sequence[int]) -> None:
        """`tokenizer` has a chat template. `stop_token_ids` end what the model samples."""
        self.template = ChatTemplate(tokenizer)
        self.encoder = TextEncoder(tokenizer, template=self.template.source)
        self.response_template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        """By which transformers reads the model's replies; None where the tokenizer brings none."""
        self._stop_token_ids = frozenset(stop_token_ids)
        controls = self.encoder.controls.items()
        self.stops: tuple[str, ...] = tuple(text for text, token_id in controls if token_id in self._stop_token_ids)
        """The stop tokens as they are written."""
        self._close_ids: Kept[list[int]] = Kept()

    def first_prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> tuple[str, list[int]]:
        """A conversation's beginning, where the assistant is to speak: its text, and its ids without a bos that the tokenizer adds.

        Raises DataError for messages that the template does not take, and for control tokens in a text that cannot be told from its own.
        """
        text = self.template.prompt(messages, tools=tools)
        render = partial(self.template.prompt, tools=tools)
        return text, foreign_ids(self.encoder, text, messages, render, source=self.template.source, begins=True)

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        finish_reason: FinishReason,
        tools: Sequence[Tool] = (),
    ) -> NextPrompt:
        """`messages` are new, and the assistant is to speak after them. `sampled_ids` is its last turn, as the engine returned it.

        A turn that ended with the stop token by which the template ends turns is not closed again. After any other end, which stays as it
        was sampled, the whole suffix follows: another stop token, such as `<|endoftext|>` or the tag of another role, a stop string, or the
        token limit. Raises DataError as `suffix` does.
        """
        assert finish_reason is not FinishReason.ABORTED, "nothing goes on after a turn that was given up"
        suffix = self.suffix(messages, tools=tools)
        ends_by_itself = finish_reason is FinishReason.STOP and sampled_ids and sampled_ids[-1] in self._stop_token_ids
        is_closed = ends_by_itself and sampled_ids[-1:] == suffix.close_ids[-1:]
        written = suffix.token_ids[len(suffix.close_ids) :] if is_closed else suffix.token_ids
        return NextPrompt(token_ids=[*prompt_ids, *sampled_ids, *written], num_written=len(written))

    def suffix(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Suffix:
        """For new messages that follow an assistant's turn; those of role `tool` name the call that they answer.

        A text that writes control tokens is cut inside each, and nowhere else; texts without any get the ids of the whole suffix encoded
        at once. Raises DataError for messages that are not text or that the template does not take, for a template that gives no exact
        suffix, and for control tokens in a text that cannot be told from the template's own.
        """
        after = after_turn(self.template, messages, tools=tools, stops=self.stops)

        def render(changed: Sequence[Message]) -> str:
            return after_turn(self.template, changed, tools=tools, stops=self.stops).text

        token_ids = foreign_ids(self.encoder, after.text, messages, render, source=self.template.source)
        close = after.close
        close_ids = self._close_ids.of(close, lambda: self.encoder.encode_on(close)) if close else []
        if token_ids[: len(close_ids)] != close_ids:
            raise not_exact(f"the next message changes the tokens of the turn's close {close!r}")
        return Suffix(text=after.text, token_ids=token_ids, close_ids=close_ids)

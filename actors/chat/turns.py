"""Exact tokens from turn to turn: the next prompt is the last prompt, the sampled tokens, and a suffix. No text of a message or a tool's
description becomes a control token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.chat.after_turn import after_turn, not_exact
from actors.chat.encoding import TextEncoder
from actors.chat.foreign_text import foreign_ids
from actors.chat.kept import Kept
from actors.chat.rendering import ChatTemplate, Message, Tool
from cluster.contracts.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """The text and ids that follow the sampled tokens."""

    text: str
    """The turn's close, the new messages, and the beginning of the next turn."""
    token_ids: list[int]
    close_ids: list[int]
    """The beginning of `token_ids` up to the stop token with which the template ends a turn; empty if it writes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    token_ids: list[int]
    written_ids: list[int]
    """The end of `token_ids` that was not sampled: the suffix without the part that the model sampled."""


class Turns:
    """One model's conversations."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: Sequence[int]) -> None:
        """`tokenizer` has a chat template. `stop_token_ids` end what the model samples."""
        self.template = ChatTemplate(tokenizer)
        self.encoder = TextEncoder(tokenizer, template=self.template.source)
        self.response_template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        """With it transformers parses the model's replies. None: the tokenizer has none."""
        self._stop_token_ids = frozenset(stop_token_ids)
        controls = self.encoder.controls.items()
        self.stops: tuple[str, ...] = tuple(text for text, token_id in controls if token_id in self._stop_token_ids)
        """The stop tokens as text."""
        self._close_ids: Kept[list[int]] = Kept()

    def first_prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> tuple[str, list[int]]:
        """A conversation up to the assistant's turn: its text, and its ids without a bos that the tokenizer adds.

        Raises DataError for messages that the template refuses, and for control tokens in a text that cannot be distinguished from the
        template's own.
        """

        def render(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
            return self.template.prompt(messages, tools=tools)

        text = render(messages, tools)
        return text, foreign_ids(self.encoder, text, render, messages, tools, begins=True)

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        finish_reason: FinishReason,
        tools: Sequence[Tool] = (),
    ) -> NextPrompt:
        """`messages` are new; the assistant's turn follows them. `sampled_ids` is its last turn, as the engine returned it.

        A turn that ended with the template's own stop token is not closed again. After any other end the whole suffix follows: after
        another stop token, such as `<|endoftext|>` or the tag of another role, a stop string, or the token limit. The end itself stays as
        it was sampled. Raises DataError as `suffix` does.
        """
        assert finish_reason is not FinishReason.ABORTED, "no turn follows an aborted one"
        suffix = self.suffix(messages, tools=tools)
        ends_by_itself = finish_reason is FinishReason.STOP and sampled_ids and sampled_ids[-1] in self._stop_token_ids
        is_closed = ends_by_itself and sampled_ids[-1:] == suffix.close_ids[-1:]
        written = suffix.token_ids[len(suffix.close_ids) :] if is_closed else suffix.token_ids
        return NextPrompt(token_ids=[*prompt_ids, *sampled_ids, *written], written_ids=written)

    def suffix(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Suffix:
        """The suffix for new messages after an assistant's turn. Messages of role `tool` name the call that they answer.

        A text that contains control tokens is cut inside each, and nowhere else; without any, the whole suffix is encoded at once. Raises
        DataError for messages that are not text or that the template refuses, for a template that gives no exact suffix, and for control
        tokens in a text that cannot be distinguished from the template's own.
        """
        after = after_turn(self.template, messages, tools=tools, stops=self.stops)

        def render(changed: Sequence[Message], _: Sequence[Tool]) -> str:
            return after_turn(self.template, changed, tools=tools, stops=self.stops).text

        token_ids = foreign_ids(self.encoder, after.text, render, messages)
        close = after.close
        close_ids = self._close_ids.of(close, lambda: self.encoder.encode_on(close)) if close else []
        if token_ids[: len(close_ids)] != close_ids:
            raise not_exact(f"the next message changes the tokens of the turn's close {close!r}")
        return Suffix(text=after.text, token_ids=token_ids, close_ids=close_ids)

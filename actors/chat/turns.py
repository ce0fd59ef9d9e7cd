"""Exact tokens from turn to turn: the next prompt is the last one, the tokens that the model sampled, and a suffix."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from actors.chat.encoding import TextEncoder
from actors.chat.foreign_text import foreign_ids
from actors.chat.rendering import ChatTemplate, Message, Tool
from actors.chat.suffixes import Suffix, SuffixWriter
from cluster.contracts.types import FinishReason


class TurnEnd(StrEnum):
    """How a turn ended, for what is written after it."""

    CLOSE = "close"
    """With the stop token by which the template ends a turn: the suffix goes on after it."""
    OTHER_TOKEN = "other_token"
    """With another stop token, such as `<|endoftext|>` or the tag of another role: it stays, and the whole suffix follows."""
    STOP_STRING = "stop_string"
    """With a stop string, whose tokens stay as they were sampled; the whole suffix follows."""
    LENGTH = "length"
    """At the token limit: the whole suffix follows, if the episode goes on at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    token_ids: list[int]
    num_written: int
    """Of them, those at the end that nobody sampled: the suffix without what the model sampled of it."""
    turn_end: TurnEnd


class Turns:
    """One model's conversations."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: Sequence[int]) -> None:
        """`tokenizer` has a chat template. `stop_token_ids` end what the model samples."""
        self.template = ChatTemplate(tokenizer)
        self.encoder = TextEncoder(tokenizer, template=self.template.source)
        self.suffixes = SuffixWriter(self.template, self.encoder, stop_token_ids=stop_token_ids)
        self.response_template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        """By which transformers reads the model's replies; None where the tokenizer brings none."""
        self._stop_token_ids = frozenset(stop_token_ids)

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

        Raises DataError as `SuffixWriter.write` does.
        """
        suffix = self.suffixes.write(messages, tools=tools)
        turn_end = self._turn_end(sampled_ids, finish_reason, suffix)
        written = suffix.token_ids[len(suffix.close_ids) :] if turn_end is TurnEnd.CLOSE else suffix.token_ids
        return NextPrompt(token_ids=[*prompt_ids, *sampled_ids, *written], num_written=len(written), turn_end=turn_end)

    def _turn_end(self, sampled_ids: Sequence[int], finish_reason: FinishReason, suffix: Suffix) -> TurnEnd:
        assert finish_reason is not FinishReason.ABORTED, "nothing goes on after a turn that was given up"
        if finish_reason is FinishReason.LENGTH:
            return TurnEnd.LENGTH
        if not sampled_ids or sampled_ids[-1] not in self._stop_token_ids:
            return TurnEnd.STOP_STRING
        return TurnEnd.CLOSE if sampled_ids[-1:] == suffix.close_ids[-1:] else TurnEnd.OTHER_TOKEN

"""One model's side of all conversations: prompts as token ids, and replies parsed for environments."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.chat.calls import Reply, ReplyParser
from actors.chat.formatter import ChatFormatter, EncodedPrompt
from actors.chat.report import ChatReport, chat_report
from actors.reasoning import CHANNEL, END_OF_THINK, THINK, parted, with_tags
from actors.rollout.stop_seam import HALF_CHARACTER
from cluster.contracts.episodes import Message, RawPrompt, ToolCall
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt

Tools = Sequence[Any]
"""JSON schemas, as chat templates take them."""


class Speech:
    """Prompts and replies of a model with a chat template whose turns are exact."""

    def __init__(self, formatter: ChatFormatter, *, parser: ReplyParser | None = None) -> None:
        """`parser` reads replies in place of the proven parser. Raises ConfigError if no conversation can continue exactly after a turn."""
        if not formatter.has_template:
            raise ConfigError(
                "environment: the model has no chat template, and a conversation needs one; set model.chat_template, or take a chat model"
            )
        self._formatter = formatter
        self.turns = formatter.turns()
        try:
            self._report: ChatReport = chat_report(self.turns)
        except DataError as error:
            raise ConfigError(f"model.chat_template: {error}") from error
        self._report.require_turns()
        self._has_own_parser = parser is not None
        proven = self._report.parser
        self._parser = parser or (proven and proven.parser)
        # Some templates only cut earlier reasoning out, which they find by its end.
        self._knows_reasoning = any(tag in self.turns.template.source for tag in (THINK, END_OF_THINK, CHANNEL))

    @property
    def max_context(self) -> int:
        return self._formatter.max_context

    def begin(self, prompt: Prompt, added: Sequence[Message], *, tools: Tools) -> EncodedPrompt:
        """The prompt's messages, then those in `added`. Without `added` and `tools` it equals the prompt of a single turn.

        Raises DataError for a prompt without messages, and for messages that the template refuses.
        """
        if prompt.messages is None:
            raise DataError(
                f"prompt {prompt.prompt_id!r} is a text without roles, but an environment needs messages; set text_as: user_message",
                prompt_id=prompt.prompt_id,
            )
        if not added and not tools:
            return self._formatter.encode(prompt)
        return self.begin_anew([*prompt.messages, *added], tools=tools)

    def begin_anew(self, messages: Sequence[Message], *, tools: Tools) -> EncodedPrompt:
        """A context of these messages alone. Raises DataError as `Turns.first_prompt` does."""
        if tools:
            self.require_tools()
        text, token_ids = self.turns.first_prompt(messages, tools=tools)
        return EncodedPrompt(text=text, token_ids=self._formatter.with_bos(token_ids))

    def begin_raw(self, raw: RawPrompt) -> EncodedPrompt:
        """A whole context as an agent wrote it. A text gets one bos if the tokenizer adds one; ids stay as they are.

        Raises DataError for an empty context, and for ids that the tokenizer does not know.
        """
        encoder = self.turns.encoder
        if isinstance(raw, str):
            begun = EncodedPrompt(text=raw, token_ids=self._formatter.with_bos(encoder.encode(raw)))
        else:
            self._require_known(raw)
            begun = EncodedPrompt(text=encoder.decode(raw), token_ids=[*raw])
        if not begun.token_ids:
            raise DataError("the prompt is empty; the model needs at least one token")
        return begun

    def go_on_raw(self, raw: RawPrompt, *, after: int) -> EncodedPrompt:
        """An agent's text or ids after a context that ends with the id `after`. Raises DataError for ids unknown to the tokenizer."""
        encoder = self.turns.encoder
        if isinstance(raw, str):
            return EncodedPrompt(text=raw, token_ids=encoder.encode_after(after, raw))
        self._require_known(raw)
        return EncodedPrompt(text=encoder.decode_on(raw), token_ids=[*raw])

    def decode_on(self, token_ids: Sequence[int]) -> str:
        """Text of ids that continue after other ids, special tokens included."""
        return self.turns.encoder.decode_on(token_ids)

    def hear_raw(self, sampled_ids: Sequence[int], *, stops: Sequence[str]) -> Reply:
        """The reply after a raw prompt, special tokens included.

        It leaves out the stop token that ended the turn. If one of `stops` ended it, it leaves out that text and all after it.
        """
        if sampled_ids[-1] in self._formatter.stop_token_ids:
            return Reply(text=self.decode_on(sampled_ids[:-1]))
        return Reply(text=self.decode_on(sampled_ids).removesuffix(self.ending(sampled_ids, stops=stops)))

    def ending(self, sampled_ids: Sequence[int], *, stops: Sequence[str]) -> str:
        """The end of the sampled text, from the one of `stops` that ended it; empty if none did."""
        *before, last = sampled_ids
        if not stops or last in self._formatter.stop_token_ids:
            return ""
        text = self.decode_on(sampled_ids)
        # The last token may complete a character.
        num_before = len(self.decode_on(before).rstrip(HALF_CHARACTER))
        # As the engine searches: the first stop text that the last token completes. One that ended before `min_tokens` does not count.
        starts = [(text.find(stop, max(num_before + 1 - len(stop), 0)), len(stop)) for stop in stops]
        start, _ = min((each for each in starts if each[0] >= 0), key=sum, default=(len(text), 0))
        return text[start:]

    def hear(
        self,
        sampled_ids: Sequence[int],
        *,
        written_ids: Sequence[int],
        tools: Tools = (),
        num_calls: int = 0,
    ) -> Reply:
        """The parsed reply after `written_ids`, the end of its prompt. Its calls are numbered from `num_calls`.

        `tools` are those that the context shows. Without any, the text of a call is the model's words. If a call is unreadable, the reply
        becomes one call whose arguments are the reply's text.
        """
        is_read = self._parser is not None or self._knows_reasoning
        written = self.turns.encoder.decode(written_ids) if is_read else ""
        if self._parser is None:
            return self._words(sampled_ids, written)
        # Foreign parsers expect neither the stop token nor reasoning, which their servers leave out.
        ends = self._has_own_parser and sampled_ids and sampled_ids[-1] in self._formatter.stop_token_ids
        sampled = self.turns.encoder.decode(sampled_ids[:-1] if ends else sampled_ids)
        reasoning, words = self._parted(sampled, written) if self._has_own_parser else (None, sampled)
        try:
            reply = self._parser(words, prompt=written, tools=tools)
        except DataError:
            if not tools:
                return self._words(sampled_ids, written)
            text = self._formatter.decode(sampled_ids)
            name = str(tools[0]["function"]["name"]) if len(tools) == 1 else "unreadable"
            reply = Reply(text="", calls=(ToolCall(name=name, arguments=text),))
        if reply.calls and not tools:
            return self._words(sampled_ids, written)
        calls = tuple(
            # Nine characters: some templates accept no other length.
            replace(call, id=f"call{num_calls + place:05}")
            for place, call in enumerate(reply.calls)
        )
        return replace(reply, reasoning=reasoning if reply.reasoning is None else reply.reasoning, calls=calls)

    def is_canonical(self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Tools) -> bool:
        """Whether the template writes these ids from the whole conversation at once, as a server that keeps no tokens would show it to the
        model."""
        try:
            return list(token_ids) == self.begin_anew(messages, tools=tools).token_ids
        except DataError:
            return False

    def written_anew(
        self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Tools
    ) -> EncodedPrompt | None:
        """The conversation as the template writes it at once, if its text differs from that of `token_ids`. None if it is the same, or if
        the template refuses it, for example for a call that is not JSON."""
        try:
            begun = self.begin_anew(messages, tools=tools)
        except DataError:
            return None
        if begun.token_ids == [*token_ids]:
            return None
        decode = self.turns.encoder.decode
        return None if decode(token_ids) == decode(begun.token_ids) else begun

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._formatter.decode(token_ids)

    def require_tools(self) -> None:
        """Raises ConfigError unless tools can be shown to the model and its calls can be read."""
        self._report.require_tools(reads_calls=self._has_own_parser)

    def _words(self, sampled_ids: Sequence[int], written: str) -> Reply:
        """The reply as text without calls."""
        reasoning, words = self._parted(self._formatter.decode(sampled_ids), written)
        return Reply(text=words, reasoning=reasoning)

    def _parted(self, sampled: str, written: str) -> tuple[str | None, str]:
        """As `parted`. With a template that knows no reasoning all is words: it would not show the reasoning to the model again."""
        if not self._knows_reasoning:
            return None, sampled
        return parted(with_tags(sampled) if self._formatter.has_channels else sampled, prompt=written)

    def _require_known(self, token_ids: Sequence[int]) -> None:
        count = self._formatter.num_token_ids
        if unknown := next((each for each in token_ids if not 0 <= each < count), None):
            raise DataError(f"the prompt has token id {unknown}, and the tokenizer knows 0 to {count - 1}")


class Opening:
    """The beginnings of a prompt's conversations, shared by its group: each distinct one is rendered and encoded once."""

    def __init__(self, prompt: Prompt, speech: Speech) -> None:
        self.prompt = prompt
        self._speech = speech
        self._begun: dict[str, EncodedPrompt] = {}

    def begin(self, added: Sequence[Message] = (), *, tools: Tools = ()) -> EncodedPrompt:
        """As `Speech.begin`, cached."""
        key = repr((added, tools))
        if key not in self._begun:
            self._begun[key] = self._speech.begin(self.prompt, added, tools=tools)
        return self._begun[key]


def as_json(value: Any) -> str:
    """In the order of its keys, in which a template writes tools and arguments."""
    return json.dumps(value, ensure_ascii=False)

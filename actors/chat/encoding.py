"""Encode text in pieces: text that continues after other ids, and text that must not become control tokens."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

_ANCHORS = (".", "x", "1", "\n", ":")
"""Texts after which the tokenizer puts no space before a word. A clean cut needs one that does not merge with the text after it."""
_SAMPLES = (" a", "a", "\n", "\n\na", "1", "|im_end|>", "/s>", " /s>", ".")


class TextEncoder:
    """Encoder of one tokenizer. `template`: the source of its chat template.

    Control tokens are the special tokens, and the added tokens that the template writes: a `</tool_response>` in a web page would end a
    tool's answer just as `<|im_end|>` would end a turn, and few tokenizers call it special. Other added tokens, such as runs of spaces or
    words, are text.
    """

    def __init__(self, tokenizer: Any, *, template: str) -> None:
        self._tokenizer = tokenizer
        self.template = template
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content}
        self._added = tuple(token.content for token in added.values())
        self.controls: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.special or _is_markup(token.content, template)
        }
        """Text to id."""
        # Characters that the vocabulary lacks become the unknown token, which is harmless.
        self._control_ids = {*self.controls.values()} - {tokenizer.unk_token_id}
        self._starts = re.compile(f"(?={_any_of(self.controls)}).", re.DOTALL)
        firsts = _any_of({text[0] for text in self.controls})
        # A normalizer may turn other characters, such as full-width ones, into these before it looks for normalized tokens.
        is_normalized = any(token.normalized for token in added.values() if token.content in self.controls)
        self._firsts = re.compile(f"{firsts}|[^\\x00-\\x7f]" if is_normalized else firsts)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that begins a context, without bos."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def encode_on(self, text: str) -> list[int]:
        """Ids of a text that continues after other ids: no space is put before its first word."""
        if not self.puts_space_first or text.startswith(self._added):
            return self.encode(text)
        ids = self._cut_cleanly(text)
        return self.encode(text) if ids is None else ids

    def encode_after(self, token_id: int, text: str) -> list[int]:
        """Ids of a text that continues after `token_id`. Some tokenizers drop the white space after a control token, others add some."""
        if token_id in self._control_ids:
            both = self.encode_on(self.decode([token_id]) + text)
            if both[:1] == [token_id]:
                return both[1:]
        return self.encode_on(text)

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Ids of pieces that continue after other ids; no token spans two pieces."""
        return [token_id for piece in pieces if piece for token_id in self.encode_on(piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_on(self, token_ids: Sequence[int]) -> str:
        """As `decode`, for ids that continue after other ids: a space before the first word stays."""
        if not self.puts_space_first:
            return self.decode(token_ids)
        begun = self.encode("x")
        return self.decode([*begun, *token_ids]).removeprefix(self.decode(begun))

    def control_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The control tokens among `token_ids`, in order."""
        return [token_id for token_id in token_ids if token_id in self._control_ids]

    def writes_control(self, text: str) -> bool:
        """Whether a part of `text` would become a control token."""
        return self._starts.search(text) is not None

    def may_begin_control(self, text: str) -> bool:
        """Whether a character of `text` begins some control token: a cheap first check, seldom true."""
        return self._firsts.search(text) is not None

    def cut_inside(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of every control token in it."""
        return self._starts.sub(lambda found: found[0] + mark, text)

    def cut_everywhere(self, text: str, mark: str) -> str:
        """`text` with a mark after every character that begins some control token."""
        return self._firsts.sub(lambda found: found[0] + mark, text)

    def harmless(self, text: str) -> str:
        """`text` with an x in place of every character that begins some control token."""
        return self._firsts.sub("x", text)

    @cached_property
    def puts_space_first(self) -> bool:
        """Whether the tokenizer puts a space before a text's first word, as Metaspace and `add_prefix_space` tokenizers do."""
        return self.decode([*self.encode("x"), *self.encode("a")]) != "xa"

    @cached_property
    def cuts_cleanly(self) -> bool:
        """Whether sample texts can be encoded to continue after other ids."""
        if not self.puts_space_first:
            return True
        begun, cut = self.encode("x"), [(text, self._cut_cleanly(text)) for text in _SAMPLES]
        return all(ids is not None and self.decode([*begun, *ids]) == "x" + text for text, ids in cut)

    @cached_property
    def unsplittable(self) -> tuple[str, ...]:
        """Control tokens that no cut can prevent: those of one character."""
        return tuple(text for text in self.controls if self.control_ids(self.encode_pieces([text[:1], text[1:]])))

    def _cut_cleanly(self, text: str) -> list[int] | None:
        """The ids of `text` after the first anchor that does not merge with it; None if all anchors do."""
        for anchor in _ANCHORS:
            ahead, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(ahead)] == ahead:
                return both[len(ahead) :]
        return None


def _is_markup(text: str, template: str) -> bool:
    return bool(text.strip()) and not text[0].isalnum() and text in template


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of `texts`; without texts it matches nothing."""
    return "|".join(map(re.escape, sorted(texts))) or r"(?!)"

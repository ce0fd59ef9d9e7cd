"""Text to ids in pieces: text that goes on where other ids end, and text that may not write control tokens."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

_ANCHORS = (".", "x", "1", "\n", ":")
"""Texts in front of which a word does not begin anew. A clean cut needs one that merges with nothing after it."""
_SAMPLES = (" a", "a", "\n", "\n\na", "1", "|im_end|>", "/s>", " /s>", ".")


class TextEncoder:
    """One tokenizer's. `template` is the source of its chat template.

    Control tokens are the special ones, and the added ones that the template writes: a `</tool_response>` in a web page ends a tool's
    answer as well as `<|im_end|>` ends a turn, and few tokenizers call it special. Other added tokens, such as runs of spaces or words, are
    text.
    """

    def __init__(self, tokenizer: Any, *, template: str) -> None:
        self._tokenizer = tokenizer
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content}
        self._added = tuple(token.content for token in added.values())
        self.controls: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.special or _is_markup(token.content, template)
        }
        """Text to id."""
        # A character that the vocabulary lacks becomes it, and that is no attack.
        self._control_ids = {*self.controls.values()} - {tokenizer.unk_token_id}
        self._starts = re.compile(f"(?={_any_of(self.controls)}).", re.DOTALL)
        firsts = _any_of({text[0] for text in self.controls})
        # A normalizer makes some other characters into these before such tokens are looked for: full-width ones, say.
        is_normalized = any(token.normalized for token in added.values() if token.content in self.controls)
        self._firsts = re.compile(f"{firsts}|[^\\x00-\\x7f]" if is_normalized else firsts)

    def encode(self, text: str) -> list[int]:
        """A text that begins here, without bos."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def encode_on(self, text: str) -> list[int]:
        """A text that goes on where other ids end: no space is put before its first word."""
        if not self.puts_space_first or text.startswith(self._added):
            return self.encode(text)
        ids = self._cut_cleanly(text)
        return self.encode(text) if ids is None else ids

    def encode_after(self, token_id: int, text: str) -> list[int]:
        """A text that goes on where other ids end with this one. Some tokenizers lose the white space after a control token, and some put a
        space there."""
        if token_id in self._control_ids:
            both = self.encode_on(self.decode([token_id]) + text)
            if both[:1] == [token_id]:
                return both[1:]
        return self.encode_on(text)

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """As if no token could reach from one piece into the next; the first goes on where other ids end."""
        return [token_id for piece in pieces if piece for token_id in self.encode_on(piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens as they are written."""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_on(self, token_ids: Sequence[int]) -> str:
        """As `decode`, of ids that go on where other ids end: a space before the first word stays."""
        if not self.puts_space_first:
            return self.decode(token_ids)
        begun = self.encode("x")
        return self.decode([*begun, *token_ids]).removeprefix(self.decode(begun))

    def control_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Those among `token_ids`, in order."""
        return [token_id for token_id in token_ids if token_id in self._control_ids]

    def writes_control(self, text: str) -> bool:
        """Whether some of `text` would become a control token."""
        return self._starts.search(text) is not None

    def may_begin_control(self, text: str) -> bool:
        """Whether some character of `text` begins a control token: a cheap question that is seldom answered with yes."""
        return self._firsts.search(text) is not None

    def cut_inside(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of every control token that it writes."""
        return self._starts.sub(lambda found: found[0] + mark, text)

    def cut_everywhere(self, text: str, mark: str) -> str:
        """`text` with a mark after every character that begins some control token."""
        return self._firsts.sub(lambda found: found[0] + mark, text)

    def harmless(self, text: str) -> str:
        """As long as `text`, without a character that begins some control token."""
        return self._firsts.sub("x", text)

    @cached_property
    def puts_space_first(self) -> bool:
        """Whether a text gets a space before its first word, as Metaspace and `add_prefix_space` tokenizers do it."""
        return self.decode([*self.encode("x"), *self.encode("a")]) != "xa"

    @cached_property
    def cuts_cleanly(self) -> bool:
        """Whether samples of text can be encoded so that they go on where other ids end."""
        if not self.puts_space_first:
            return True
        begun, cut = self.encode("x"), [(text, self._cut_cleanly(text)) for text in _SAMPLES]
        return all(ids is not None and self.decode([*begun, *ids]) == "x" + text for text, ids in cut)

    @cached_property
    def unsplittable(self) -> tuple[str, ...]:
        """Control tokens that a text can write however it is cut: those of one character."""
        return tuple(text for text in self.controls if self.control_ids(self.encode_pieces([text[:1], text[1:]])))

    def _cut_cleanly(self, text: str) -> list[int] | None:
        """Its ids after the first anchor whose last token does not reach into it; None where there is none."""
        for anchor in _ANCHORS:
            ahead, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(ahead)] == ahead:
                return both[len(ahead) :]
        return None


def _is_markup(text: str, template: str) -> bool:
    return bool(text.strip()) and not text[0].isalnum() and text in template


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that finds nothing where there are none."""
    return "|".join(map(re.escape, sorted(texts))) or r"(?!)"

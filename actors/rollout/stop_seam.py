"""Finds stop texts that begin in the kept tokens of a resumed request: the engine gets these as its prompt, and does not search them."""

from collections.abc import Callable, Sequence

_TOKENS_OF_A_CHARACTER = 4
"""At most: one per byte of UTF-8."""
HALF_CHARACTER = "\ufffd"
"""Tokenizers decode the beginning of a character as this."""


class StopSeam:
    """Search of one request. Call `ends` until a stop text ends, or until none can begin in the kept tokens any more (`is_past`)."""

    def __init__(
        self, kept: Sequence[int], *, stops: Sequence[str], min_tokens: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """`stops` is not empty. No stop text ends in the `kept` tokens, and none counts within the completion's first `min_tokens`."""
        self._stops = stops
        self._decode = decode
        self._longest = max(map(len, stops))
        self._tail = list(kept[-_TOKENS_OF_A_CHARACTER * self._longest :])
        self._num_before = len(self._tail) + max(min_tokens - len(kept), 0)
        """Number of the tail's first tokens in which no stop text may end."""
        self.is_past = False

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop text ends in `token_ids`, the next tokens."""
        self._tail += token_ids
        text = self._decode(self._tail)
        # A character may continue after the seam.
        num_before = len(self._decode(self._tail[: self._num_before]).rstrip(HALF_CHARACTER))
        self.is_past = len(text) - num_before >= self._longest
        return any(text.find(stop, max(num_before + 1 - len(stop), 0)) >= 0 for stop in self._stops)

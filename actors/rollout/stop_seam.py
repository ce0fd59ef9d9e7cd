"""Stop texts of a resumed request that begin in the tokens it had: an engine that gets these as its prompt does not see them."""

from collections.abc import Callable, Sequence

_TOKENS_OF_A_CHARACTER = 4
"""At most: UTF-8, byte by byte."""
HALF_CHARACTER = "\ufffd"
"""As tokenizers write the beginning of one."""


class StopSeam:
    """Of one request. It is asked until a stop text ends, or until none can begin in the kept tokens any more (`is_past`)."""

    def __init__(
        self, kept: Sequence[int], *, stops: Sequence[str], min_tokens: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """There is at least one of `stops`, and none ends in the `kept` tokens or counts in the first `min_tokens` of the completion."""
        self._stops = stops
        self._decode = decode
        self._longest = max(map(len, stops))
        self._tail = list(kept[-_TOKENS_OF_A_CHARACTER * self._longest :])
        self._num_before = len(self._tail) + max(min_tokens - len(kept), 0)
        """Tokens of the tail in which no stop text ends."""
        self.is_past = False

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop text ends in these tokens, the next ones."""
        self._tail += token_ids
        text = self._decode(self._tail)
        # A character may have its other half behind the seam.
        num_before = len(self._decode(self._tail[: self._num_before]).rstrip(HALF_CHARACTER))
        self.is_past = len(text) - num_before >= self._longest
        return any(text.find(stop, max(num_before + 1 - len(stop), 0)) >= 0 for stop in self._stops)

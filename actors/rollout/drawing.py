"""Draws tokens by their probabilities, with one uniform number a row, of its request's own generator."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

_NUM_AHEAD = 64
_BLOCK = 512
"""Probabilities that are summed in float32, before their sums are added in float64."""
_BELOW_ONE = 1 - 2**-50
"""Its product with any sum is less than that sum, however it is rounded."""


class Uniforms:
    """Uniform numbers of generators, taken `_NUM_AHEAD` at a time: one costs as much as all of them."""

    def __init__(self) -> None:
        self._ahead: WeakKeyDictionary[Generator, list[float]] = WeakKeyDictionary()

    def of(self, generators: Mapping[int, Generator], *, num_rows: int) -> Tensor:
        """The next number of each row's generator, [rows] in float64, from 0 to less than 1; of torch's own for a row without one."""
        numbers = (
            [0.0] * num_rows if len(generators) == num_rows else torch.rand(num_rows, dtype=torch.float64).tolist()
        )
        for row, generator in generators.items():
            numbers[row] = self._next(generator)
        return torch.tensor(numbers, dtype=torch.float64)

    def _next(self, generator: Generator) -> float:
        ahead = self._ahead.get(generator)
        if not ahead:
            ahead = torch.rand(_NUM_AHEAD, generator=generator, dtype=torch.float64).flip(0).tolist()
            self._ahead[generator] = ahead
        return ahead.pop()


def token_at(shares: Tensor, probs: Tensor) -> Tensor:
    """The first token of each row at which the summed probabilities exceed this share of their sum: never one of probability 0.

    `shares` [rows] in float64, from 0 to less than 1; `probs` [rows, vocabulary] in float32. Returns [rows]. With uniform shares, tokens
    are drawn by their probabilities (inverse transform sampling).
    """
    vocabulary = probs.shape[1]
    if vocabulary <= _BLOCK:
        return _place_at(shares, probs)[0]
    whole = vocabulary - vocabulary % _BLOCK
    masses = probs[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(-1)
    if whole < vocabulary:
        masses = torch.cat([masses, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    blocks, inside = _place_at(shares, masses)
    tokens = blocks[:, None] * _BLOCK + torch.arange(_BLOCK)
    found, _ = _place_at(
        inside, probs.gather(1, tokens.clamp(max=vocabulary - 1)).masked_fill_(tokens >= vocabulary, 0)
    )
    return (blocks * _BLOCK + found).clamp_(max=vocabulary - 1)


def _place_at(shares: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row at which the summed masses exceed this share of their sum, and the share of its own mass before that."""
    ends = masses.cumsum(1, dtype=torch.float64)
    target = shares.clamp(max=_BELOW_ONE)[:, None] * ends[:, -1:]
    # Sums that are no numbers have no such place; the token's log-prob is none either.
    places = torch.searchsorted(ends, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, places).double()
    inside = (target - ends.gather(1, places) + mass) / mass
    return places[:, 0], inside[:, 0].clamp_(min=0)

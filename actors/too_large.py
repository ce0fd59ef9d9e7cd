"""Powers and factorials in a model's answer that take longer to compute than any deadline.

The size of a number is the absolute value of its decimal logarithm: both 1000 and 1/1000 have size 3. The size of a formula is an upper
bound. It is infinite if a part of the formula is too large to compute. Variables have size 0, since their powers are not computed.
"""

import functools
import math
import re

# Each character is read once: a policy that has lost its way writes thousands.
_TOKEN = re.compile(
    r"(?P<number>(?:\d++(?:_\d++)*+\.?\d*+|\.\d++)(?:e[+-]?\d++)?)|\\?(?P<function>[a-z]++(?=\s*+[({\[]))|\\?[a-z]++|\*\*|!+|[^\s\\]",
    re.IGNORECASE,
)
_LARGEST = 5 + 1e-9
"""Size of the largest exponent, and of the largest argument of a factorial, with room for rounding."""
_MOST_DIGITS = 1_000_000


def is_too_large(text: str) -> bool:
    """Whether it has such a power or factorial, in LaTeX or as sympy reads it."""
    groups, function = [_Group("")], ""
    for token in _TOKEN.finditer(text):
        found, group = token[0], groups[-1]
        if token["function"]:
            function = token["function"]
            continue
        if found in "([{":
            groups.append(_Group(function))
        elif found in ")]}":
            _close(groups)
        elif token["number"]:
            group.add(_size_of(found))
        elif found[-1].isalpha():
            group.add(0.0)
        else:
            group.apply(found)
        function = ""
    while len(groups) > 1:
        _close(groups)
    return groups[0].size() == math.inf


class _Group:
    """The sizes between two brackets, which may be the arguments of a function."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._arguments: list[float] = []
        self._terms: list[float] = []
        self._factors: list[float] = []
        self._tower: list[float] = []
        """The last base, its exponent, the exponent of that."""
        self._awaits_exponent = False
        self._awaits_index = False

    def add(self, size: float) -> None:
        """A number, variable or group, which multiplies what precedes it."""
        if self._awaits_index:
            self._awaits_index = False
            return
        if not self._awaits_exponent:
            self._end_factor()
        self._tower.append(size)
        self._awaits_exponent = False

    def apply(self, operator: str) -> None:
        if operator in ("^", "**"):
            self._tower = self._tower or [0.0]
            self._awaits_exponent = True
        elif operator == "_":
            self._awaits_index = True
        elif operator[0] == "!" and self._tower:
            self._tower[-1] = _factorial(self._tower[-1])
        elif operator == ",":
            self._end_argument()
        elif operator not in "+-":
            self._end_factor()
        elif not self._awaits_exponent:
            self._end_term()

    def size(self) -> float:
        self._end_argument()
        if self._function in ("pow", "Pow", "root") and len(self._arguments) == 2:
            return _power(self._arguments[1], self._arguments[0])
        size = sum(self._arguments)
        return _factorial(size) if self._function in ("factorial", "Gamma") else size

    def _end_factor(self) -> None:
        if self._tower:
            self._factors.append(functools.reduce(_power, reversed(self._tower)))
        self._tower, self._awaits_exponent = [], False

    def _end_term(self) -> None:
        self._end_factor()
        if self._factors:
            self._terms.append(sum(self._factors))
        self._factors = []

    def _end_argument(self) -> None:
        self._end_term()
        if self._terms:
            most = max(self._terms)
            self._arguments.append(most if most > 300 else math.log10(sum(10**size for size in self._terms)))
        self._terms = []


def _close(groups: list[_Group]) -> None:
    if len(groups) > 1:
        size = groups.pop().size()
        groups[-1].add(size)


def _size_of(number: str) -> float:
    value = float(number)
    if value == math.inf:
        return float(len(number))
    return abs(math.log10(value)) if value else 0.0


def _power(exponent: float, base: float) -> float:
    if math.inf in (exponent, base):
        return math.inf
    if not base:
        return 0.0
    size = base * 10 ** min(exponent, 300)
    return math.inf if exponent > _LARGEST or size > _MOST_DIGITS else size


def _factorial(size: float) -> float:
    return math.inf if size > _LARGEST else size * 10**size

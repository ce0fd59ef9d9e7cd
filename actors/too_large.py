"""Powers and factorials in a model's answer that take longer to compute than any deadline."""

import re

# Each reads a run of digits once: a policy that has lost its way writes thousands.
_POWERS = re.compile(r"(?<!\d)(?<!\d\.)\d[\d.]*+(?:\s*(?:\^|\*\*)[\s{(]*\d[\d.]*+)+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FACTORIAL, _FACTORIAL_OF_ONE = re.compile(r"(?<!\d)(\d++)\s*+!"), re.compile(r"!\s*[)}][\s)}]*!")
_LARGEST = 100_000
"""Largest exponent, and largest argument of a factorial."""
_CALL = re.compile(rf"\bfactorial\s*+\((?!\s*+(?:{_LARGEST}|\d{{1,5}})\s*+\))")
"""A factorial of anything but a number up to the largest."""


def is_too_large(text: str) -> bool:
    """Whether it has such a power or factorial, in LaTeX or as sympy reads it."""
    for chain in _POWERS.findall(text):
        exponent = 1.0
        for number in reversed(_NUMBER.findall(chain)[1:]):
            try:
                exponent = float(number) ** exponent
            except OverflowError:
                return True
        if exponent > _LARGEST:
            return True
    is_large = any(len(number) > 6 or int(number) > _LARGEST for number in _FACTORIAL.findall(text))
    return is_large or any(pattern.search(text) for pattern in (_FACTORIAL_OF_ONE, _CALL))

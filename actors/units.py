r"""Units in answers in LaTeX.

math-verify cuts off all text from the first `\text` or `\mbox` on if the answer ends with a brace, and else a plain unit at the end.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_NAMES = (
    "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "in inch inche", "ft foot feet",
    "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram", "oz ounce", "lb pound", "ml milliliter millilitre", "l liter litre",
    "sec second s", "min minute m", "h hr hour", "day", "week", "month", "yr year", "cent", "dollar", "euro", "degree", "radian",
    "thousand", "million m", "billion", "trillion",
)  # fmt: skip
"""The names of each unit, without an s at the end. `m` is a name of three."""
_UNITS = {name: {names for names in _NAMES if name in names.split()} for name in " ".join(_NAMES).split()}
_MILLILITERS = ("ml", "milliliter", "milliliters", "millilitre", "millilitres")
_WORDS = re.compile(r"\\(?:text|mbox)\{")
_PLAIN = re.compile(r"(?<=[\d}])\s*[A-Za-z]+(?:\^\d|\^\{\d\})?$")
_RATE = re.compile(
    r"(?<=\d)(?:\s|~|\\[ ,]){0,3}([A-Za-z]{1,12})/([A-Za-z]{1,12})(?:\^\d|\^\{\d\})?(?=\s{0,3}(?:[}$]|\Z))"
)
_CUT_OFF = re.compile(r"\}(?:\^\d|\{\^\d\})?$")
# These read a run of spaces or brackets once: a policy that has lost its way writes thousands.
_POWER = re.compile(r"(?<![\s}])[\s}]*+\^\s*+\{?+\s*+(-?\d{1,9})\s*+\}?+")
_SPACE = re.compile(r"\\(?:text|mbox)\{|\\[,;:! ]|\\q?quad\b|[{}~]")
_UNIT = re.compile(r"\s*(?P<name>[^\W\d_]+)\.?(?:\^(?P<power>-?\d{1,9})|(?P<raised>[²³]))?")
_ALONE = re.compile(r"[\s.,;]*(?:$|[=(]|\\approx)")
_PREFIX = re.compile(r"(?:nano|micro|milli|centi|kilo|mega|giga)(?=[a-z]{3})")
_WORD = re.compile(r"(?<!\\)\b[a-z]{3,30}")
_NUMBER = re.compile(
    r"[\s,+]*+(?:(?P<numerator>\d{1,9})/|\\frac\s+(?P<above>\d{1,9})\s+)?(?P<number>\d[\d,]{0,30}(?:\.\d{1,30})?)(?=\s*[^\W\d_])"
)
# Words of a case, which many write in other ways: `\text{if } x > 0`, `\text{for } x > 0`.
_OF_CASES = re.compile(r"\\(?:text|mbox)\{[\s,.]*+(?:if|for|when|where|otherwise|else)?[\s,.]*+\}|\\[,;:! ]|[\s~]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    names: set[str]
    power: int


def same_tail(gold: str, said: str) -> bool:
    """Whether the parts that math-verify cuts off say the same, of two answers whose other parts are equal.

    All numbers count: `hours 20 minutes` and `hours 45 minutes` differ. A missing or unknown unit is like any unit; two known units must be
    the same. If a bracket is open where an answer is cut, as between the cases of a function, all of its text counts.
    """
    (gold_head, gold_tail), (head, tail) = _parted(gold), _parted(said)
    if _is_open(gold_head) or _is_open(head):
        return _OF_CASES.sub("", gold) == _OF_CASES.sub("", said)
    if _differ_by_prefix(gold_tail, tail):
        return False
    (gold_numbers, gold_units), (numbers, units) = _parts(gold_tail), _parts(tail)
    return gold_numbers == numbers and not any(
        one and other and (one.power != other.power or not one.names & other.names)
        for one, other in zip(gold_units, units, strict=False)
    )


def _differ_by_prefix(gold_tail: str, tail: str) -> bool:
    """Whether their first words are one unit with two prefixes, such as `volts` and `kilovolts`, known or not."""
    gold, said = (
        next((each for each in _WORD.findall(text.lower()) if each not in ("text", "mbox")), "")
        for text in (gold_tail, tail)
    )
    gold, said = gold.removesuffix("s"), said.removesuffix("s")
    return gold != said and _PREFIX.sub("", gold) == _PREFIX.sub("", said)


def without_rate(text: str) -> str:
    """Cuts off a known unit by another one after a number that ends an answer: `km/h` of `12 km/h`."""
    return _RATE.sub(lambda rate: "" if all(map(_of_name, rate.groups())) else rate[0], text)


def _parted(text: str) -> tuple[str, str]:
    found = _WORDS.search(text) if _CUT_OFF.search(text) else _PLAIN.search(text)
    if found is None or not text[: found.start()].strip():
        return text, ""
    return text[: found.start()], text[found.start() :]


def _is_open(head: str) -> bool:
    bare = re.sub(r"\\[{}]", "", head)
    return bare.count("{") > bare.count("}") or head.count(r"\begin") > head.count(r"\end")


def _parts(tail: str) -> tuple[list[Fraction], list[_Unit | None]]:
    """The numbers between the units, and the units, each None if it is not known."""
    flat = _SPACE.sub(" ", _POWER.sub(r"^\1", tail))
    numbers, units, place = list[Fraction](), list[_Unit | None](), 0
    while unit := _UNIT.match(flat, place):
        number = _NUMBER.match(flat, unit.end())
        units.append(_known(unit) if number or _ALONE.match(flat, unit.end()) else None)
        if number is None:
            break
        value = Fraction(number["number"].replace(",", ""))
        above = number["numerator"] or number["above"]
        numbers.append(int(above) / value if above and value else value)
        place = number.end()
    return numbers, units


def _known(unit: re.Match[str]) -> _Unit | None:
    name = unit["name"].lower()
    names = _of_name(name)
    power = "  ²³".index(unit["raised"]) if unit["raised"] else int(unit["power"] or 1)
    if name in _MILLILITERS and power == 1:
        return _Unit(names=_UNITS["cm"], power=3)
    return _Unit(names=names, power=power) if names else None


def _of_name(name: str) -> set[str] | None:
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))

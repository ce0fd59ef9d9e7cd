"""Reward for a mathematically equal answer by the package math-verify: LaTeX, fractions, sets, intervals, units."""

import functools
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import math_verify as package
from latex2sympy2_extended.logic import And
from math_verify.grader import take_last_relation
from math_verify.parser import NormalizationConfig, normalize_latex
from sympy import Expr, Rational, UnevaluatedExpr
from sympy.core.relational import Relational

from actors.columns import text_of
from actors.reasoning import after_reasoning
from actors.too_large import is_too_large
from actors.units import same_tail, without_rate
from cluster.contracts.errors import DataError

# The package warns once a process that its deadlines are off. `math_verify` below says why they are.
logging.getLogger(package.__name__).setLevel(logging.ERROR)

_SMALL, _NEAR = 1e-3, 1e-3
"""Numbers below `_SMALL` that are equal differ by at most this share of the gold. Larger ones with the same six decimals do so anyway."""
_TINY, _NEAR_TINY = 1e-6, 1e-5
"""The same below `_TINY`: six decimals have no digit of such a number."""
_PERCENT = UnevaluatedExpr(Rational(1, 100))
"""The package reads `9%` as 9 times this."""
_WITH_UNITS = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[\\{}]|(?P<open>\{)|(?P<close>\})")
# It reads a run of spaces once: a policy that has lost its way writes thousands.
_JOINS = re.compile(r"[\s$]*(?:[,;]|(?:,\s*)?(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*")
_MOST_NESTED = 12
"""Most brackets in one another. The parser takes seconds for 15, and twice as long for two more."""
_MIXED = re.compile(r"(?<![\w.,/^])(?<!\^\{)(\d{1,9})\s+([1-9]\d?)/([1-9]\d{0,2})(?![\w/^]|[.,]\d)")
_THIN = r"(?:\\[, ]|[~\u00a0\u2009\u202f])"
_GROUPS = re.compile(rf"(?<![\w.,^])\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)")
"""Groups of three digits: `12\\,000`."""
_SPACED = re.compile(r"(?:(?<=boxed\{)|\A)\s*[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?\s*(?=\}|\Z)")
"""The same with plain spaces, as a whole answer."""
_SCIENTIFIC = re.compile(r"(\A\$?|boxed\{)\s*([+-]?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})\s*(?=\}|\$?\Z|\\text)")
"""A number such as `1.6e-19` as a whole answer. The package reads it as 1.6 times Euler's number minus 19."""
_OTHER_NUMBERS = (
    "plus|minus|less|basis|gross|radians|dozens|hundreds|thousands|[a-z]{0,9}illions|halves|thirds|quarters|"
    "(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand|[a-z]{1,9}illion|[a-z]{1,6}teen|[a-z]{1,6}tie)ths"
)
_COUNTED = re.compile(
    r"((?:\A\$?|boxed\{)\s*[+-]?(?:\\?\$)?(?:\d[\d,]{0,30}(?:\.\d{1,30})?"
    r"(?:/\d{1,9}|[eE][+-]?\d{1,3}|\s?(?:\\times|\\cdot|×)\s?10\^\{?-?\d{1,3}\}?)?|\\d?frac\{\d{1,9}\}\{\d{1,9}\}))"
    rf"\s+(?!(?:{_OTHER_NUMBERS})\b)([a-z]{{3,20}}s|people|men|women|children|feet)\.?\s*(?=\}}|\$?\Z)"
)
"""A number with a plain noun in the plural as a whole answer: `18 eggs`. The package knows some words as units, and reads others as
products of letters. Other words may make another number of it: `3 fifths`, `3 sinx`, `3 below zero`."""
_CURRENCY = re.compile(r"[€£¥₹]\s?(?=[\d.])|(?<=\d)\s?[€£¥₹]")
_SENTENCE = re.compile(
    r"(?!\s*[+-]?\s*(?:\\?\$)?\s*[+-]?(?:\d|\\d?frac|\\sqrt))"
    r"(?:\([A-J]\)\s|(?s:.)*?(?:\$|\\[(\[]|(?<![\\A-Za-z{])[A-Za-z]{3}))"
)
"""An answer between tags that may be a sentence with a formula, and no formula alone: it does not begin with a number."""
_LONGEST_FORMULA = 200
"""Longer sentences are not read as formulas too: the parser would take seconds for thousands of words."""
_FULL_STOP = re.compile(r"(?<=[\d)\]}])\.\s*\Z")
_AS_TEXT = (re.compile(r"\A(?:\\\w+\{)?\s*([A-Z]{3,})\s*\}?\Z"), re.compile(r"\d_\{?(\d+)\}?\Z"))
"""Words of capitals, which the package reads as products, and bases of numbers, which it leaves out."""


def math_verify(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    column: str = "answer",
) -> float:
    r"""1 if the completion's answer equals the prompt's `column`, else 0. The answer is the last \boxed{...}, else in the last
    `<answer>...</answer>`, else LaTeX, else a plain expression. Boxes joined only by `,`, `;`, `and` or `or` are one answer with several
    values. `2 1/2` is a mixed number. Text before a `</think>` or after an unclosed `<think>` is not an answer, nor is a box with a number
    too large to compute, such as 10^{10^{10}}, nor are more than 12 brackets in one another, the box's own included. Words of three or more
    capitals are compared as text, and so are the bases of two numbers such as `25_7`.

    Decimals are compared at six places, numbers below 0.001 also to 0.1 %, and those below 0.000001 to 0.001 %. Units are not converted: a
    missing or unknown one is fine, another one than the column's, such as `m` for `km`, is wrong, and both numbers of
    `3 \text{ hours } 20 \text{ minutes}` count.

    Raises DataError if the prompt has no such column or the column does not parse.
    """
    text = text_of(columns, column)
    # The package's own deadlines are off: they are alarm signals, which only main threads get. The reward service enforces the deadline.
    answer = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    if (box := _boxed(answer)) is not None:
        return _compared(text, box, is_box=True)
    if (tagged := _tagged(answer)) is None:
        return _compared(text, answer, is_box=False)
    is_sentence = _SENTENCE.match(tagged) is not None
    box = f"\\boxed{{{tagged}}}"
    is_formula = _boxed(box) == box and (not is_sentence or len(tagged) <= _LONGEST_FORMULA)
    if is_formula and _compared(text, box, is_box=True):
        return 1.0
    return _compared(text, tagged, is_box=False) if is_sentence else 0.0


def _compared(text: str, answer: str, *, is_box: bool) -> float:
    """The reward of an answer to the column's text."""
    gold, answer = _gold(text), _plain(answer)
    if (is_box and is_too_large(answer)) or any(map(_is_deep, [answer] if is_box else answer.splitlines())):
        return 0.0
    said = _parsed(answer)
    is_equal = any(_are_equal(one, other) for one, other in itertools.product(gold, said))
    if not is_equal or not _have_same_text(gold, said):
        return 0.0
    whole_gold = _uncut(_counted(_plain(_boxed(text) or text)))
    return float(same_tail(whole_gold, _uncut(_counted(answer)) if is_box else _last_uncut(answer)))


def _tagged(text: str) -> str | None:
    """The text of the last `<answer>`, which a stop string may have left open. None if there is none."""
    _, is_tagged, after = text.rpartition("<answer>")
    tagged = _FULL_STOP.sub("", after.partition("</answer>")[0].strip().strip("*"))
    return tagged if is_tagged and tagged.strip(".") else None


def _are_equal(gold: Any, said: Any) -> bool:
    """As the package, which compares decimals at six places and other numbers at 15, but small numbers also relative to the gold."""
    if not package.verify(gold, said, timeout_seconds=None):
        return False
    if isinstance(gold, str) or gold == said:
        return True
    try:
        return _are_close(_value_side(gold, other=said), _value_side(said, other=gold))
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        # The package's word stands for numbers that sympy does not evaluate.
        return True


def _have_same_text(gold: list[Any], said: list[Any]) -> bool:
    for pattern in _AS_TEXT:
        one, other = (
            {found[1] for each in parsed if isinstance(each, str) and (found := pattern.search(each))}
            for parsed in (gold, said)
        )
        if one and other and one.isdisjoint(other):
            return False
    return True


def _are_close(gold: Any, said: Any) -> bool:
    if not all(isinstance(each, Expr) and each.is_number for each in (gold, said)):
        return True
    of_gold = _values(gold)
    if len(of_gold) == 1 and abs(of_gold[0]) >= _SMALL:
        return True
    return any(_is_near(other, gold=one) for one, other in itertools.product(of_gold, _values(said)))


def _is_near(said: Any, *, gold: Any) -> bool:
    size = abs(gold)
    bound = _NEAR if size >= _TINY else _NEAR_TINY
    # sympy evaluates a sum that is exactly zero to noise of about 1e-125.
    return bool(size < 1e-100 or abs(gold - said) <= bound * size)


def _values(number: Any) -> list[Any]:
    """Its value; of a percentage also the number before the sign, since `9%` may be called 9."""
    if len(number.args) == 2 and number.args[1] == _PERCENT:
        before = number.args[0].evalf()
        return [before / 100, before]
    return [number.evalf()]


def _value_side(of: Any, *, other: Any) -> Any:
    """The right side of an equation that is compared with a number."""
    is_equation = isinstance(of, Relational | And) and not isinstance(other, Relational | And)
    return take_last_relation(of).rhs if is_equation else of


def _uncut(latex: str) -> str:
    """As the package normalizes it, with its units and all that follows them."""
    return normalize_latex(latex, _WITH_UNITS)


def _last_uncut(text: str) -> str:
    """The LaTeX that the package reads in a text without a box. Empty if it has no words, so nothing is cut off."""
    if not re.search(r"\\(?:text|mbox|math(?:rm|it|bf))", text):
        return ""
    config = [package.LatexExtractionConfig(normalization_config=_WITH_UNITS), package.ExprExtractionConfig()]
    return next((each for each in package.parse(text, config, parsing_timeout=0) if isinstance(each, str)), "")


@functools.lru_cache(maxsize=1024)
def _gold(text: str) -> list[Any]:
    # Data sets write answers without dollars ("\frac{1}{2}"), but LaTeX parses only between dollars.
    text = _plain(_boxed(text) or text)
    is_marked = "$" in text or "\\boxed" in text
    # In "\$18.90" the dollar is a currency sign and no mark of LaTeX.
    parsed = (is_marked and _parsed(text)) or _parsed(f"${text}$")
    if not parsed:
        raise DataError(
            f"the answer {text[:80]!r} is not a mathematical expression; compare it with the reward exact_match"
        )
    return parsed


def _parsed(text: str) -> list[Any]:
    """All readings of the answer: the letters of `km/h` or `18 eggs` may be units or variables, and `2e-1` a number or a difference."""
    counted = _counted(text)
    power = _SCIENTIFIC.sub(r"\1\2 \\times 10^{\3}", counted)
    decimal = _SCIENTIFIC.sub(lambda number: f"{number[1]}{Decimal(f'{number[2]}e{number[3]}'):f}", counted)
    readings = dict.fromkeys((text, without_rate(text), counted, power, decimal))
    return [each for reading in readings for each in package.parse(reading, parsing_timeout=0)]


def _boxed(text: str) -> str | None:
    r"""The last closed \boxed{...}, with the boxes joined to it. None if there is none."""
    opened: list[re.Match[str] | None] = []
    boxes: list[tuple[re.Match[str], int]] = []
    for found in _BRACE.finditer(text):
        if found["box"]:
            opened.append(found)
        elif found["open"]:
            opened.append(None)
        elif found["close"] and opened and (box := opened.pop()) is not None:
            while boxes and boxes[-1][0].start() > box.start():  # inside this one
                boxes.pop()
            boxes.append((box, found.start()))
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and _JOINS.fullmatch(text, boxes[first - 1][1] + 1, boxes[first][0].start()):
        first -= 1
    contents = (_FULL_STOP.sub("", text[box.end() : end]) for box, end in boxes[first:])
    return ", ".join(f"\\boxed{{{content}}}" for content in contents)


def _is_deep(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        if depth > _MOST_NESTED:
            return True
    return False


def _plain(text: str) -> str:
    """Writes numbers as the package reads them: without spaces between their digits, currency signs and mixed numbers."""
    text = _CURRENCY.sub("", text).replace("°", r"^{\circ}")
    text = _SPACED.sub(lambda number: "".join(number[0].split()), text)
    return _improper(_GROUPS.sub(lambda number: re.sub(_THIN, "", number[0]), text))


def _counted(text: str) -> str:
    r"""Writes the noun after a number as a text: `18\text{ eggs}`."""
    return _COUNTED.sub(r"\1\\text{ \2}", text)


def _improper(text: str) -> str:
    """Replaces mixed numbers such as `2 1/2`, which the package reads as a product or a sum, by fractions such as `5/2`."""

    def written(mixed: re.Match[str]) -> str:
        whole, numerator, denominator = map(int, mixed.groups())
        return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else mixed[0]

    return _MIXED.sub(written, text)

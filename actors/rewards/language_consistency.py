"""Reward for staying in one script: a completion that mixes scripts earns less."""

import unicodedata
from typing import Literal

Script = Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai", "han", "japanese", "korean"]
_NAMES: dict[str, tuple[str, ...]] = {
    "han": ("CJK", "IDEOGRAPHIC"),
    "japanese": ("HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"),
    "korean": ("HANGUL", "CJK"),
}
"""Prefixes of the Unicode names of a script's letters. For other scripts the prefix is the script's name."""


def language_consistency(*, completion: str, script: Script = "latin") -> float:
    """Share of the completion's letters that belong to the script. 0 for a completion without letters.

    It distinguishes English from Chinese, but not from German. Source: the language consistency reward of DeepSeek-R1, arXiv:2501.12948,
    which takes the share of words
    """
    letters = [each for each in completion if each.isalpha()]
    beginnings = _NAMES.get(script, (script.upper(),))
    return sum(unicodedata.name(each, "").startswith(beginnings) for each in letters) / len(letters) if letters else 0.0

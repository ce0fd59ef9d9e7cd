"""Docstrings, comments and pages are in plain English: no sentence hides its noun behind "what" or "whoever"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax_trees import tree

ROOT = Path(__file__).parents[2]
CODE = [
    file
    for package in ("actors", "cluster", "deploy", "learner", "treadwheel")
    for file in (ROOT / package).rglob("*.py")
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
HIDES_ITS_NOUN = re.compile(
    r"(?:^|[.:;] |\n)(?:What|Whatever) [^.?!:;]*(?:[.:;]|$)"  # a subject that is a clause; a question is none
    r"|\b(?:of|from|to|by|with|for|than|in|on|as|after|before|beside|into|under|at|over|through) what \w+(?! to\b)"
    r"|\b[Ww]hoever\b"
)


def _texts(source: str) -> Iterator[str]:
    """Docstrings, texts of fields, and comments."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("What a failed worker left is dealt again.", True),
        ("Raises the errors of the post, and more than what it raises.", True),
        ("Whoever waits gets the error.", True),
        ("What does the learner wait for? It waits for groups.", False),
        ("The log says what failed.", False),
        ("Its unfinished tickets return to the queue.", False),
    ],
)
def test_a_sentence_that_hides_its_noun_is_found(text, is_found):
    assert (HIDES_ITS_NOUN.search(text) is not None) == is_found


def test_code_and_pages_are_in_plain_english():
    texts = [(file, text) for file in CODE for text in _texts(file.read_text(encoding="utf-8"))]
    texts += [(page, page.read_text(encoding="utf-8")) for page in PAGES]
    found = [
        f"{file.relative_to(ROOT)}: {match[0].strip()}"
        for file, text in texts
        for match in HIDES_ITS_NOUN.finditer(text)
    ]
    assert len(texts) > 5000
    assert found == [], "begin with the subject, and name it"

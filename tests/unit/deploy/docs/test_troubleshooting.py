"""The messages that docs/troubleshooting.md quotes are messages of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
PLACEHOLDER = "\0"


@cache
def templates() -> tuple[str, ...]:
    """All texts of the code, with a placeholder for each value that is put in."""
    found = set[str]()
    for package in ("actors", "cluster", "deploy", "learner", "treadwheel"):
        for path in (ROOT / package).rglob("*.py"):
            found.update(texts(path.read_text(encoding="utf-8")))
    return tuple(found)


def texts(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def is_in(quoted: str, template: str) -> bool:
    """Whether the pieces of `quoted` stand in the template in their order, with at least one value between two of them."""
    pieces = (re.escape(piece.strip()) for piece in quoted.split("…"))
    return re.search(f".*{PLACEHOLDER}.*".join(pieces), template, re.DOTALL) is not None


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_quotes_a_message_of_the_code(heading):
    quoted = re.fullmatch(r"`([^`]+)`", heading)
    assert quoted, "a heading is a message, in backticks"
    assert any(is_in(quoted[1], template) for template in templates()), "the message changed: change the page too"


def test_a_message_with_another_constant_part_is_not_found():
    template = next(texts('f"run_dir={url!r} is in " f"use by {owner}; wait"'))
    assert is_in("is in use by …; wait", template)
    assert not is_in("is in use of …; wait", template)
    assert not is_in("is in use … by", template)


def test_what_only_a_docstring_says_is_no_message():
    assert list(texts('"""is in use"""')) == []


def test_no_message_has_two_entries():
    assert len(HEADINGS) == len(set(HEADINGS)) > 30

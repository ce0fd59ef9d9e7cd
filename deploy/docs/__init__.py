"""Pages made from the code and from the prose in this folder. `make docs` writes them, and a test finds stale ones."""

from collections.abc import Iterable, Mapping
from pathlib import Path

_NOTE = "<!-- Made by `make docs` from the code and from deploy/docs: edit there. -->"
_PROSE = Path(__file__).parent


def write(files: Mapping[str, str], *, folder: str) -> None:
    """Writes generated files, by name, to `folder`, a path from the checkout."""
    for name, content in files.items():
        Path(folder, name).write_text(content, encoding="utf-8")
        print(f"{folder}/{name}")


def filled(page: str, **parts: str) -> str:
    """The prose of a page, with each part in the place of its `{name}`."""
    text = (_PROSE / f"{page}.md").read_text(encoding="utf-8")
    for name, part in {"note": _NOTE, **parts}.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def rows(cells: Iterable[tuple[str, ...]]) -> str:
    """Rows of a Markdown table, with any text in its cells."""
    return "\n".join(f"| {' | '.join(map(cell, each))} |" for each in cells)


def cell(text: str) -> str:
    """The text as one line for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")

"""Pages made from the code and from the prose in this folder, so that they cannot go stale: `make docs` writes them, a test compares."""

from collections.abc import Iterable, Mapping
from pathlib import Path

_NOTE = "<!-- Made by `make docs` from the code and from deploy/docs: edit there. -->"
_PROSE = Path(__file__).parent


def write(files: Mapping[str, str], *, folder: str) -> None:
    """Generated files by their names in the folder, which is told from the checkout."""
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
    """Of a Markdown table, whatever is in its cells."""
    return "\n".join(f"| {' | '.join(map(cell, each))} |" for each in cells)


def cell(text: str) -> str:
    """One line that a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|")

"""Pages of Markdown that readers follow, as blocks that tests run.

The convention of all pages:

* Every fence names its language. Commands are `bash`, without prompt signs; output and drawings are `text`.
* A page is followed from top to bottom in an empty folder of its own. Tests put there what `tests/integration/page_folder.py` says.
* `bash` runs under `bash -euo pipefail`, with `treadwheel`, `python` and `pytest` on the PATH.
* A block whose first line is a comment that begins with a file name (`# my_rewards.py, beside it`) is that file.
* Other `python` is a script. Other `yaml` is a part of a run file, and `json` is JSON.
* `<!-- not run: REASON -->` on the line above a fence excuses it. A test that the reason names must exist.
* `<!-- before: COMMANDS -->` above a fence is bash that readers do not see, and runs before the block.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/README.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name != "CHANGELOG.md"
)
"""Of readers, below the repository's root. The changelog may name what is gone."""
_PARSER = MarkdownIt("commonmark").enable("table")
_FILE = re.compile(r"(?:#|//|%%writefile) (\S+\.\w+)\b")
_NOT_OF_FILE = ("%%writefile ", "// ")
"""Beginnings of a first line that the file lacks: of a notebook's cell, and in JSON, which has no comments."""
_COMMENT = re.compile(r"<!-- (not run|before):\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    """Of the fence's first line, from 1."""
    language: str
    text: str
    file: str | None
    """The file that the block is, None where its first line names none."""
    before: str | None
    not_run: str | None
    """Why."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """Fences and indented code of a page, in order."""
    found: list[Block] = []
    comments: dict[str, str] = {}
    for token in _PARSER.parse(text):
        if token.type == "html_block":
            comments |= _COMMENT.findall(token.content)
        elif token.type in ("fence", "code_block"):
            first, _, rest = token.content.partition("\n")
            file = _FILE.match(first)
            found.append(
                Block(
                    page=page,
                    line=(token.map or [0])[0] + 1,
                    language=token.info,
                    text=rest if first.startswith(_NOT_OF_FILE) else token.content,
                    file=file[1] if file else None,
                    before=comments.get("before"),
                    not_run=comments.get("not run"),
                )
            )
            comments = {}
        elif token.content:
            comments = {}
    return found


def blocks_of(page: str) -> list[Block]:
    return blocks(page, (ROOT / page).read_text(encoding="utf-8"))


def inline_code(text: str) -> list[str]:
    """Code in running text and in tables."""
    return [token.content for token in _inline(text) if token.type == "code_inline"]


def links(text: str) -> list[str]:
    """Targets of links and of pictures."""
    targets = (token.attrGet("href") or token.attrGet("src") for token in _inline(text))
    return [str(target) for target in targets if target]


def tables(text: str) -> list[list[str]]:
    """Lines of each table."""
    lines = text.splitlines()
    maps = (token.map for token in _PARSER.parse(text) if token.type == "table_open")
    return [lines[slice(*each)] for each in maps if each]


def anchors(text: str) -> set[str]:
    """Names by which a page's headings are linked."""
    tokens = _PARSER.parse(text)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _inline(text: str) -> Iterator[Token]:
    for token in _PARSER.parse(text):
        yield from token.children or ()

"""The documentation site, built as `make site` does: whole, and asking nobody for anything."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deploy.docs.site_hooks import on_page_markdown

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    navigation = set(_Tags.of(site / "index.html").values("nav", "a", "href"))
    assert [page for page in PAGES if f"{page}.html" not in navigation | {"index.html"}] == []


def test_no_page_asks_another_host(site):
    files = sorted(site.rglob("*.html"))
    assert len(files) > len(PAGES)
    for file in files:
        tags = _Tags.of(file)
        loaded = [value for name in ("src", "srcset", "poster", "data") for value in tags.values(None, None, name)]
        loaded += [value for tag in ("link", "use") for value in tags.values(None, tag, "href")]
        assert [each for each in loaded if each.startswith(("http:", "https:", "//"))] == [], file.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text()), style.name


def test_search_finds_every_page(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    texts = {entry["location"]: entry["title"] + entry["text"] for entry in index["docs"]}
    assert [page for page in PAGES if not texts.get(f"{page}.html")] == []


def test_the_reference_has_every_public_name(site):
    there = set(_Tags.of(site / "reference.html").values(None, None, "id"))
    assert [name for name in _public_names() if name not in there] == []


def test_lists_and_tables_are_no_running_text(site):
    """Python-Markdown wants an empty line before them; forges do not."""
    paragraphs = {page: re.findall(r"<p>(.*?)</p>", (site / f"{page}.html").read_text(), re.DOTALL) for page in PAGES}
    begun = re.compile(r"^(\* |- |\d+\. |\|)", re.MULTILINE)
    assert [(page, each) for page, those in paragraphs.items() for each in those if begun.search(each)] == []


def test_links_that_leave_the_pages_become_paths():
    text = "[a](page.md#b), [gpu.yaml](../deploy/gpu.yaml) and a [small model](../deploy/model/README.md#card)"
    said = "[a](page.md#b), `deploy/gpu.yaml` and a small model (`deploy/model/README.md`)"
    assert on_page_markdown(text) == said


def _public_names() -> list[str]:
    """As the reference's anchors are called. What all errors have stands with the first of them."""
    text = (ROOT / "tests/unit/treadwheel/public_names.txt").read_text()
    names, owner = [], ""
    for line in text.splitlines():
        name = line.removeprefix("class ").strip().partition("(")[0]
        if not line.startswith(" "):
            owner = f"treadwheel.{name}"
            names.append(owner)
        elif name not in ("details", "kind"):
            names.append(f"{owner}.{name}")
    return [*names, "treadwheel.TreadwheelError.details", "treadwheel.TreadwheelError.kind"]


class _Tags(HTMLParser):
    """All attributes of a page: the tags around them, their own tag, name, value."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._found: list[tuple[frozenset[str], str, str, str]] = []

    @classmethod
    def of(cls, file: Path) -> "_Tags":
        tags = cls()
        tags.feed(file.read_text())
        return tags

    def values(self, inside: str | None, tag: str | None, name: str) -> list[str]:
        return [
            value
            for around, its_tag, its_name, value in self._found
            if its_name == name and tag in (None, its_tag) and (inside is None or inside in around)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._found += [(frozenset(self._open), tag, name, value or "") for name, value in attrs]
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

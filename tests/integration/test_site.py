"""The documentation site in a real browser: every page at two widths, from a server and from a disk."""

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.integration.browser import PATIENCE_MS, chromium, looking, screenshot
from tests.integration.commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
SHOWN = PAGES[::10]
"""Of these there are pictures, which take longer than all else: a page is many windows high."""
NARROW, WIDE = 390, 1280


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--site-dir", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def url(site) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.mark.parametrize(("width", "names"), [(NARROW, PAGES), (WIDE, PAGES[::5])], ids=["narrow", "wide"])
def test_no_page_is_wider_than_the_window_or_says_an_error(browser, url, width, names):
    with looking(browser, f"{url}/index.html", width=width) as page:
        for name in names:
            page.goto(f"{url}/{name}.html")
            page.wait_for_load_state("load")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("[...document.images].filter((each) => !each.naturalWidth).length") == 0, name
            if name in SHOWN:
                screenshot(page, f"site-{name}-{width}")


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_search_finds_a_page(browser, url, width):
    with looking(browser, f"{url}/index.html", width=width) as page:
        _search(page, "glossary", width=width)
        expect(page).to_have_url(f"{url}/glossary.html?h=glossary")
        screenshot(page, f"site-found-{width}")


def test_the_search_finds_a_page_in_a_folder_on_disk(browser, site):
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto((site / "index.html").as_uri())
    _search(page, "glossary", width=WIDE)
    expect(page).to_have_url((site / "glossary.html").as_uri() + "?h=glossary")
    context.close()


def test_the_colours_are_the_systems(browser, url):
    grounds = set()
    for scheme in ("light", "dark"):
        with looking(browser, f"{url}/index.html", scheme=scheme) as page:
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            screenshot(page, f"site-{scheme}")
    assert len(grounds) == 2


def _search(page: Page, word: str, *, width: int) -> None:
    if width == NARROW:
        page.locator("label[for=__search].md-header__button").click()
    page.get_by_role("textbox", name="Search").press_sequentially(word)  # it listens to keys
    page.locator(".md-search-result__link", has_text=word.capitalize()).first.click()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """The test's output stays readable."""

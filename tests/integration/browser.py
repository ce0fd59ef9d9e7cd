"""A real Chromium that looks at the viewer, and whatever a page must never do: say an error, ask another host, miss a file."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from tests.integration.commands import ROOT, Background

SCREENSHOTS = ROOT / "build" / "screenshots"
"""Of every page that a test looked at: CI keeps them."""

PATIENCE_MS = 120_000
"""Until a page shows what is expected of it: a busy machine needs a multiple of Playwright's five seconds."""
expect.set_options(timeout=PATIENCE_MS)

NAMELESS = """() => [...document.querySelectorAll('a, button, input, select, [role=img], [tabindex="0"]')]
    .filter((each) => !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length))
    .map((each) => each.outerHTML)"""
"""What a screen reader could only call "button"."""


def debian(program: str) -> str:
    """Its path. Skips where it is not installed; CI must have it."""
    if path := shutil.which(program):
        return path
    missing = f"{program} is missing: apt-get install --no-install-recommends {program}"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = {"executable_path": debian("chromium"), "args": ["--no-sandbox"], "timeout": PATIENCE_MS}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@contextlib.contextmanager
def looking(browser: Browser, url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """A page in a fresh profile. In the end it must have said no error, asked no other host, and found all that it asked for."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # pyright: ignore
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("response", lambda answer: said.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.on(
        "request",
        lambda request: said.append(f"foreign: {request.url}") if not request.url.startswith(origin) else None,
    )
    origin = re.match(r"https?://[^/]+", url)[0] + "/"  # pyright: ignore
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert said == []


@contextlib.contextmanager
def offline(browser: Browser, file: Path) -> Iterator[Page]:
    """The file in a browser without a network. In the end it must have asked for nothing and said no error."""
    said: list[str] = []
    context = browser.new_context(offline=True)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: said.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    try:
        yield page
    finally:
        context.close()
    assert said == []


@contextlib.contextmanager
def viewing(*arguments: object) -> Iterator[tuple[str, Background]]:
    """`treadwheel view` with these arguments: the URL that it printed, and the command."""
    with Background("view", *arguments) as command:
        command.wait_until(lambda: re.search(r"viewing on \S+\s", command.output))
        yield command.output.split("viewing on ")[1].split()[0], command


def screenshot(page: Page, name: str) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    file = SCREENSHOTS / f"{name}.png"
    try:
        page.screenshot(path=file, full_page=True)
    except Error as error:
        if "Unable to capture screenshot" not in error.message:  # Chromium's own failure, on a busy machine
            raise
        page.screenshot(path=file, full_page=True)
    return file


def numbers_of(page: Page) -> dict[str, str]:
    """Of the token that is pointed at."""
    return page.locator(".numbers").evaluate(
        "each => Object.fromEntries([...each.children].map((row) => [row.children[0].textContent, row.children[1].textContent]))"
    )

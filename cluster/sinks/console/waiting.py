"""A spinner for the time before a command has anything to show. It appears only in a terminal, and leaves nothing behind."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.spinner import Spinner
from rich.text import Text

from cluster.sinks.console.drawing import duration
from cluster.sinks.console.terminal import is_live, live

_PER_SECOND = 8.0


@contextlib.contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Shows the spinner while the block runs. Other output stays, above it."""
    if not is_live(sys.stdout):
        yield
        return
    began = time.monotonic()
    spinner = Spinner("dots" if sys.stdout.encoding.lower().startswith("utf") else "line", style="cyan")

    def draw() -> Spinner:
        spinner.update(text=Text.assemble(f"{doing}  ", (duration(time.monotonic() - began), "dim")))
        return spinner

    with live(draw, per_second=_PER_SECOND, is_transient=True):
        yield

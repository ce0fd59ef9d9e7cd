"""A tool that runs Python programs in the sandbox of `actors.sandbox`. Programs share no state.

The model is told the result of its program, also a crash or a timeout. Only a failure of the sandbox is the environment's failure.
"""

import contextlib
import functools
import os
import queue
from collections.abc import Iterator

from pydantic import PositiveInt

from actors.sandbox.sandbox import Sandbox, SandboxConfig, Verdict
from cluster.contracts.tools import Tool, tool

_WAIT_S = 600.0
"""Deadline of a call, including the wait for a free sandbox. The sandbox itself has shorter limits."""
_MAX_AT_ONCE = 4


def python_tool(*, sandbox: SandboxConfig | None = None, max_characters: PositiveInt = 4000) -> Tool:
    """The tool `python`. The model sees at most `max_characters` of a program's output, from both ends.

    Tools with equal `sandbox` settings in one process share sandboxes: one a processor, at most four.
    """
    sandboxes = _sandboxes(sandbox or SandboxConfig())

    @tool(timeout_s=_WAIT_S)
    def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Each program starts afresh, without files and network.

        Args:
            code: the whole program; it must print its results.
        """
        with sandboxes.one() as box:
            ran = box.run(code)
        printed = ran.stdout.strip()
        if ran.verdict is not Verdict.OK:
            return _cut(f"{printed}\n{ran.verdict}: {ran.detail}".strip(), max_characters)
        return _cut(printed, max_characters) or "the program printed nothing"

    return python


class _Sandboxes:
    """A pool of sandboxes, created on demand. Each runs one program at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._boxes: queue.LifoQueue[Sandbox | None] = queue.LifoQueue()
        """The last one that ran is taken first. None stands for one that is not created yet."""
        for _ in range(min(_MAX_AT_ONCE, os.cpu_count() or 1)):
            self._boxes.put(None)

    @contextlib.contextmanager
    def one(self) -> Iterator[Sandbox]:
        """Raises ConfigError if nothing can confine a program here."""
        box = self._boxes.get()
        try:
            box = box or Sandbox(self._config)
            yield box
        finally:
            self._boxes.put(box)


_sandboxes = functools.cache(_Sandboxes)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[len(text) - half :]}"

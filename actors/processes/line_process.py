"""The parent's side of a process that runs a user's code: start it, exchange lines of JSON, kill it with all that it started."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import TypeAdapter

from actors.processes.confinement import environment
from actors.processes.printed import PrintedLines
from cluster.contracts.errors import ConfigError, WorkerError

_Answer = TypeVar("_Answer")

_START_S = 120.0
"""Deadline for a process to import the user's code: heavy packages on a busy machine take long."""


class LineProcess:
    """The parent's end of a process whose module begins with `actors.processes.inside`."""

    def __init__(self, process: asyncio.subprocess.Process, printed: PrintedLines) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._printed = printed

    @classmethod
    async def start(
        cls,
        module: str,
        brief: dict[str, Any],
        *,
        answers: TypeAdapter[_Answer],
        env: Collection[str],
        max_line_bytes: int,
        printed: PrintedLines,
        what: str,
    ) -> tuple["LineProcess", _Answer]:
        """Starts the process and sends `brief` as its first line. Returns it with its answer, parsed by `answers`. `env` names further
        environment variables for it; its prints go to `printed`.

        Raises ConfigError if it refuses the brief, and WorkerError naming `what` if it cannot start, dies, does not answer in time, or
        gives an unreadable answer.
        """
        try:
            with printed.pipe() as stderr:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the working directory is searched last, as everywhere
                    "-m",
                    module,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    limit=max_line_bytes,
                    # A session of its own: processes that the code starts end with it, and only the driver gets a Ctrl-C of the terminal.
                    start_new_session=True,
                    # The process finds a user's code where this process does.
                    env=environment(os.environ, names=env, search_path=sys.path),
                )
        except OSError as error:  # too many processes or open files, or no memory
            raise WorkerError(f"{what} cannot start: {error}") from error
        started = cls(process, printed)
        try:
            return started, await started._answer_to(brief, answers=answers, what=what)
        except BaseException:
            await started.kill()
            raise

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.returncode

    def write(self, message: Any) -> None:
        """Returns at once; the message is sent when the pipe has room. If the process has ended, the next `receive` shows it."""
        if (
            not self._stdin.is_closing()
        ):  # uvloop, on which Ray runs actors, raises RuntimeError for a pipe that the process has left
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def send(self, message: Any) -> None:
        """As `write`, but returns when the pipe has room again."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.write(message)
            await self._stdin.drain()

    async def receive(self) -> Any:
        """The next message; None if the process has ended. Raises ValueError for a line that is not JSON or too long."""
        line = await self._stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def wait(self) -> None:
        """Waits until the process has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """Kills the process and its group, and waits until the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._printed.drain()

    async def _answer_to(self, brief: dict[str, Any], *, answers: TypeAdapter[_Answer], what: str) -> _Answer:
        try:
            async with asyncio.timeout(_START_S):
                await self.send(brief)
                answer = await self.receive()
            if answer is None:
                raise WorkerError(f"{what} died while it started, with its message on stderr")
            if isinstance(answer, dict) and "refused" in answer:
                raise ConfigError(answer["refused"])
            return answers.validate_python(answer)
        except TimeoutError:
            raise WorkerError(f"{what} is not ready after {_START_S:g} s") from None
        except ValueError as error:  # the user's code can write anything there
            raise WorkerError(f"the first answer of {what} is unreadable: {error}") from error

"""Runs foreign programs, each in its own process group: their prints are read line by line, and the whole group is killed at the end."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_KEEPER = Path(__file__).with_name("keeper.py")
_MAX_LINE_BYTES = 1024**2
_DRAIN_S = 5.0
"""How long to read on after the group is killed: only a process that left the group can still hold the pipe."""

_KEEPER_S = 10.0
"""Deadline for the keeper to kill the group."""

Hear = Callable[[bytes], None]


async def run_program(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: bytes, on_stdout: Hear, on_stderr: Hear
) -> int:
    """Returns the program's exit code; negative for a signal. `on_stdout` and `on_stderr` get each line when it is printed, in pieces of at
    most a MiB.

    Kills the whole group at the end, and when it is cancelled. Raises OSError if no process can be started.
    """
    async with contextlib.AsyncExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        file.write(stdin)
        file.seek(0)
        watched, held = os.pipe()
        # The keeper kills the group when this end is closed, also because this process was killed.
        keeping = stack.enter_context(os.fdopen(held, "wb", 0))
        with contextlib.ExitStack() as started:
            started.callback(os.close, watched)
            stdout = started.enter_context(await stack.enter_async_context(_heard(on_stdout)))
            stderr = started.enter_context(await stack.enter_async_context(_heard(on_stderr)))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_KEEPER), str(watched), *argv),
                stdin=file,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                pass_fds=(watched,),
                start_new_session=True,
            )
        try:
            return await process.wait()
        finally:
            keeping.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEPER_S):
                    await process.wait()
            if process.returncode is None:  # the program has stopped its keeper
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def _heard(hear: Hear) -> AsyncIterator[IO[Any]]:
    """A pipe's writing end, which the caller closes once the program has it. On exit all prints have been passed to `hear`."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
    )
    listening = asyncio.create_task(_listen(reader, hear))
    try:
        yield os.fdopen(writing, "wb", 0)
        await asyncio.wait([listening], timeout=_DRAIN_S)
    finally:
        listening.cancel()
        transport.close()
        await asyncio.wait([listening])


async def _listen(reader: asyncio.StreamReader, hear: Hear) -> None:
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as rest:
            if rest.partial:
                hear(rest.partial)
            return
        except asyncio.LimitOverrunError as long:
            line = await reader.read(long.consumed)
        hear(line)

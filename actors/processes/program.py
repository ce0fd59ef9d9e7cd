"""Programs of others, in a process group each: what they print is heard line by line, and nothing of the group survives."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_KEEPER = Path(__file__).with_name("keeper.py")
_MAX_LINE_BYTES = 1024**2
_DRAIN_S = 5.0
"""For the rest of what was printed, once the group is gone: only a process that left it still holds the pipe."""

Hear = Callable[[bytes], None]


async def run_program(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: bytes, on_stdout: Hear, on_stderr: Hear
) -> int:
    """Its exit code; negative for a signal. Lines are heard as they come, and are cut at a MiB.

    Cancelled, and at its end, it kills the whole group. Raises OSError if no process can be made.
    """
    async with contextlib.AsyncExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        file.write(stdin)
        file.seek(0)
        watched, held = os.pipe()
        stack.callback(os.close, held)  # ends the group where this process can do nothing any more
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@contextlib.asynccontextmanager
async def _heard(hear: Hear) -> AsyncIterator[IO[Any]]:
    """A pipe's end to print into, which is closed once the program has it. At the end, all that was printed has been heard."""
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

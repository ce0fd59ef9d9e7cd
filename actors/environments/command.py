"""Runs a program that calls the policy through OpenAI's API: any agent, in any language, with its own packages."""

import json
import os
import signal
import sys
from collections import deque
from typing import Annotated, Any

from pydantic import Field

from actors.processes.program import run_program
from cluster.contracts.episodes import Episode
from cluster.contracts.errors import DataError, WorkerError

_LAST_LINES = 5


async def command(
    episode: Episode,
    *,
    argv: Annotated[list[str], Field(min_length=1)],
    env: dict[str, str] | None = None,
    cwd: str | None = None,
) -> Any:
    """Runs a program for each episode. It gets the task as JSON on stdin, and OPENAI_BASE_URL and OPENAI_API_KEY in its environment.

    Its last line on stdout is the verdict as JSON: a number, an object with `reward`, or nothing or `null` if the judges decide. An exit
    code other than 0 is a failure. `env` adds environment variables to those of `episodes.env`. At the end of the episode the whole
    process group of the program is killed.
    """
    stdout, stderr = _Stdout(), _Stderr()
    code = await run_program(
        argv,
        env=_environment(episode, env or {}),
        cwd=cwd,
        stdin=json.dumps(_task(episode)).encode(),
        on_stdout=stdout.read,
        on_stderr=stderr.read,
    )
    if code:
        stdout.print_last()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise WorkerError(f"{argv[0]} {how}: {' | '.join(stderr.lines) or 'nothing on stderr'}")
    return _verdict(stdout.last)


def _task(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "prompt": episode.prompt,
        "messages": list(episode.messages),
        "columns": episode.columns,
        "seed": episode.seed,
        "index": episode.index,
    }


def _environment(episode: Episode, env: dict[str, str]) -> dict[str, str]:
    # PYTHONPATH names the packages of this process, not those of the program.
    passed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    # A proxy does not reach this machine's loopback address. Clients differ in the spelling that they read.
    direct = ",".join(filter(None, [passed.get("no_proxy", passed.get("NO_PROXY")), "127.0.0.1"]))
    proxies = {"no_proxy": direct, "NO_PROXY": direct}
    return passed | proxies | {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.api_key}


def _verdict(line: bytes) -> Any:
    if not line.strip():
        return None
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"the last line on stdout must be a verdict in JSON, not {line[:200]!r}") from error


class _Stdout:
    """Prints each line when the next one arrives. The last line is the verdict and stays unprinted."""

    def __init__(self) -> None:
        self.last = b""

    def read(self, line: bytes) -> None:
        if line.strip():
            self.print_last()
            self.last = line

    def print_last(self) -> None:
        if self.last:
            _print(self.last)


class _Stderr:
    """Prints each line at once. The last lines go into the error message of a failure."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)

    def read(self, line: bytes) -> None:
        _print(line)
        if text := line.decode(errors="replace").strip():
            self.lines.append(text)


def _print(line: bytes) -> None:
    print(line.decode(errors="replace").rstrip("\n"), file=sys.stderr)

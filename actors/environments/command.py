"""A program that speaks with the policy through OpenAI's API: any agent, in any language, with packages of its own."""

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
    """Runs a program for each episode, with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the task as JSON on stdin.

    Its last line on stdout is the verdict as JSON: a number, an object with `reward`, or nothing or `null` where judges decide. An exit
    code that is not 0 is a failure. `env` is added to the environment variables of `episodes.env`. At the end of the episode its whole
    process group is killed.
    """
    stdout, stderr = _Held(), _Told()
    code = await run_program(
        argv,
        env=_environment(episode, env or {}),
        cwd=cwd,
        stdin=json.dumps(_task(episode)).encode(),
        on_stdout=stdout.hear,
        on_stderr=stderr.hear,
    )
    if code:
        stdout.flush()
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
    # PYTHONPATH has the packages of this process: the program has its own.
    passed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    # A proxy does not reach this machine's own addresses. Some clients read one spelling, and some the other.
    direct = ",".join(filter(None, [passed.get("no_proxy", passed.get("NO_PROXY")), "127.0.0.1"]))
    proxies = {"no_proxy": direct, "NO_PROXY": direct}
    return passed | proxies | {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.api_key}


def _verdict(line: bytes) -> Any:
    if not line.strip():
        return None
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"the last line on stdout is no verdict in JSON, but {line[:200]!r}") from error


class _Held:
    """Lines that are printed once another one has come: the last one is the verdict."""

    def __init__(self) -> None:
        self.last = b""

    def hear(self, line: bytes) -> None:
        if line.strip():
            self.flush()
            self.last = line

    def flush(self) -> None:
        if self.last:
            _print(self.last)


class _Told:
    """Lines that are printed at once. The last ones tell of a failure."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)

    def hear(self, line: bytes) -> None:
        _print(line)
        if text := line.decode(errors="replace").strip():
            self.lines.append(text)


def _print(line: bytes) -> None:
    print(line.decode(errors="replace").rstrip("\n"), file=sys.stderr)

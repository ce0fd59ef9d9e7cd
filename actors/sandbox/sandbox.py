"""Runs programs of a model under confinement and returns verdicts.

The program's own behaviour becomes a verdict. Any other failure raises and is a failed reward: a kernel without confinement, a host process
that died, a machine without memory.
"""

import json
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt

from actors.sandbox.confinement import Bounds
from actors.sandbox.host_process import HostProcess, memory_files, text_of
from actors.sandbox.proxies import decode
from actors.sandbox.roles import OUT_OF_MEMORY
from cluster.contracts.checked import Checked
from cluster.contracts.errors import ConfigError, DataError, WorkerError

_log = logging.getLogger(__name__)
_WALL = 4
"""Wall-clock seconds a program may take for each second of processor time: other work may occupy the processor."""


class Verdict(StrEnum):
    """Result of a program. A failure that the program did not cause raises instead."""

    OK = "ok"
    WRONG = "wrong"
    CRASHED = "crashed"
    OUT_OF_TIME = "out_of_time"
    OUT_OF_MEMORY = "out_of_memory"


class SandboxConfig(Checked):
    """Confinement and limits of programs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    if TYPE_CHECKING:

        def __hash__(self) -> int: ...  # pydantic makes it

    level: Literal["auto", "landlock", "bwrap", "none"] = "auto"
    """`auto` uses Landlock if the kernel has it, inside bubblewrap if that works, and refuses to run without either. `none` runs programs
    unconfined, as the user who started the run."""
    time_s: PositiveFloat = 4.0
    """Processor time of one program, summed over its threads. It may take four times as long by the wall clock."""
    total_s: PositiveFloat = 20.0
    """Wall-clock time for all runs of one completion's program. Must be less than reward.timeout_s."""
    memory_bytes: PositiveInt = 1024**3
    """Address space of one program, including 50 MB for the interpreter."""
    output_bytes: PositiveInt = 1024**2
    """Maximum size of a program's standard output, and of its standard error."""
    imports: tuple[str, ...] = ()
    """Modules outside the standard library to import in advance, such as numpy. Programs can then read site-packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    verdict: Verdict
    stdout: str
    detail: str
    """Reason of a verdict other than `ok`, and the end of the program's standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to one question about a program's functions."""

    verdict: Verdict
    value: Any = None
    """Of an expression with the verdict `ok`."""
    detail: str = ""


class Sandbox:
    """Runs one program at a time, in one host process that ends with it or with this process."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises ConfigError, with the kernel's reason, if nothing can confine a program at this level."""
        self.config = config
        self._host = HostProcess(level=config.level, imports=config.imports)
        self.confined_by = self._host.confined_by
        if self.run("print(6 * 7)").stdout != "42\n":
            raise ConfigError(
                f"sandbox.level={config.level!r}: a program that prints 42 fails under {self.confined_by}"
            )
        if config.level == "none":
            _log.warning("sandbox.level=none: programs of the model run unconfined, as the user who started this run")

    def run(
        self, program: str, *, stdin: str = "", wall_s: float = float("inf"), output_bytes: int | None = None
    ) -> Ran:
        """Runs a script. `output_bytes` replaces the configured limit if it is larger. Raises WorkerError if the program cannot be run."""
        most = max(self.config.output_bytes, output_bytes or 0)
        with memory_files(stdin, "", "", program) as files:
            (end,) = self._host.exchange([("script", files)], self._bounds(wall_s=wall_s, output_bytes=most))
            verdict, detail = self._verdict(end)
            stdout, stderr = (text_of(descriptor) for descriptor in files[1:3])
            if verdict is not Verdict.OUT_OF_TIME and max(os.fstat(each).st_size for each in files[1:3]) >= most:
                verdict, detail = Verdict.CRASHED, f"more than {most} bytes of output"
        return Ran(verdict=verdict, stdout=stdout, detail=f"{detail}\n{stderr[-500:]}".strip())

    def ask(self, program: str, questions: Sequence[str], *, output_bytes: int | None = None) -> list[Answer]:
        """Answers to `questions`, expressions or statements that use the program's globals, in order.

        The program runs in its own process and returns plain values, so it cannot decide a result otherwise. A failed assertion is `wrong`,
        any other exception `crashed`. `output_bytes`, for all values together, replaces the configured limit if it is larger. Raises
        WorkerError if the program cannot be run, and DataError for a question that passes it a value that is not plain, such as a lambda.
        """
        asked, asking = os.pipe()
        answered, answering = os.pipe()
        texts = ("", "", "", program, "", "", "", json.dumps(list(questions)), "")
        with memory_files(*texts) as files:
            served = [*files[:4], asked, answering]
            testing = [*files[4:8], answered, asking, files[8]]
            most = max(self.config.output_bytes, output_bytes or 0)
            ends = self._host.exchange(
                [("serve", served), ("test", testing)],
                self._bounds(wall_s=self.config.total_s, output_bytes=most),
                lent=(asked, asking, answered, answering),
            )
            lines = text_of(files[8]).splitlines(keepends=True)
        answers = [_answer(line) for line in lines if line.endswith("\n")]
        if len(answers) < len(questions):
            verdict, detail = self._verdict(ends[1])
            if verdict is Verdict.OK:
                verdict, detail = self._verdict(ends[0])
            if verdict is Verdict.OK:
                verdict, detail = Verdict.CRASHED, "the program ended before its tests did"
            answers += [Answer(verdict=verdict, detail=detail)] * (len(questions) - len(answers))
        return answers

    def lacks(self, modules: Iterable[str]) -> list[str]:
        """The modules that programs and tests cannot import."""
        return self._host.lacks(modules)

    def close(self) -> None:
        self._host.close()

    def _bounds(self, *, wall_s: float, output_bytes: int) -> Bounds:
        limits = self.config
        return Bounds(
            time_s=limits.time_s,
            wall_s=min(_WALL * limits.time_s, wall_s),
            memory_bytes=limits.memory_bytes,
            output_bytes=output_bytes,
        )

    def _verdict(self, end: dict[str, Any]) -> tuple[Verdict, str]:
        if end["refusal"]:
            raise WorkerError(f"sandbox_failed: a program cannot be confined: {end['refusal']}", stage="sandbox")
        code = end["code"]
        if end["why"] == "time" or code == -signal.SIGXCPU or end["time_s"] > self.config.time_s:
            return Verdict.OUT_OF_TIME, f"more than {self.config.time_s:g} s of processor time, or {_WALL} times that"
        if end["why"]:
            return Verdict.CRASHED, end["why"]
        if code == OUT_OF_MEMORY or (code == -signal.SIGKILL and 2 * end["rss_bytes"] > self.config.memory_bytes):
            return Verdict.OUT_OF_MEMORY, f"more than {self.config.memory_bytes} bytes of memory"
        if code == -signal.SIGKILL:
            raise WorkerError(
                "sandbox_failed: the program was killed from outside; is the machine out of memory?", stage="sandbox"
            )
        if code:
            return Verdict.CRASHED, f"exit code {code}"
        return Verdict.OK, ""


def _answer(line: str) -> Answer:
    try:
        status, said = json.loads(line)
        if status == "ok":
            return Answer(verdict=Verdict.OK, value=decode(said, [].__getitem__))
    except Exception:  # noqa: BLE001 - the program chose the value and its nesting depth
        return Answer(verdict=Verdict.CRASHED, detail="not a plain value")
    if status == "unsendable":
        raise DataError(said)
    kind = said.partition(":")[0]
    reasons = {"AssertionError": Verdict.WRONG, "MemoryError": Verdict.OUT_OF_MEMORY}
    return Answer(verdict=reasons.get(kind, Verdict.CRASHED), detail=said)

"""Runs programs of a model under confinement, and says what became of them.

What a program does is its verdict. Only what is not its doing raises, and is a failed reward: a kernel that confines nothing, a host
process that died, a machine without memory.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from actors.sandbox.confinement import Bounds
from actors.sandbox.roles import OUT_OF_MEMORY, decode
from cluster.contracts.errors import ConfigError, WorkerError

_log = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]
_START_S = 120.0
_ANSWER_S = 10.0
"""Beyond a program's own deadline, after which the host process is taken to hang."""
_WALL = 4
"""Seconds on the clock that a program may take for each second of processor time: other work may take the processor from it."""
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/zero")
_IMPORTED = ("bisect", "collections", "copy", "fractions", "functools", "heapq", "itertools", "math", "re", "string")
"""Common modules, imported once. Programs may import all of the standard library."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_START = (
    "import json, sys; sys.path.insert(0, {!r}); from actors.sandbox import host; host.main(**json.loads(sys.argv[1]))"
)


class Verdict(StrEnum):
    """What became of a program. What is not its doing is no verdict: it raises."""

    OK = "ok"
    WRONG = "wrong"
    CRASHED = "crashed"
    OUT_OF_TIME = "out_of_time"
    OUT_OF_MEMORY = "out_of_memory"


class SandboxConfig(BaseModel):
    """How programs are confined, and how much they may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["auto", "landlock", "bwrap", "none"] = "auto"
    """`auto` takes Landlock where the kernel has it, with bubblewrap in front where that works, and refuses to run where neither holds.
    `none` runs programs as the user who started the run."""
    time_s: PositiveFloat = 4.0
    """Processor time of one program, of all its threads. It may take four times as long on the clock."""
    total_s: PositiveFloat = 20.0
    """On the clock, for all runs of one completion's program; it must be less than reward.timeout_s."""
    memory_bytes: PositiveInt = 1024**3
    """Address space of one program, the interpreter's 50 MB included."""
    output_bytes: PositiveInt = 1024**2
    """What a program may write to its standard output, and to its standard error."""
    imports: tuple[str, ...] = ()
    """Modules beyond the standard library that are imported beforehand, such as numpy; site-packages can be read then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    verdict: Verdict
    stdout: str
    detail: str
    """Why it is not `ok`, in words; the end of what it wrote to its standard error where it crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To one question about a program's functions."""

    verdict: Verdict
    value: Any = None
    """Of an expression, where the verdict is ok."""
    detail: str = ""


class Sandbox:
    """Programs, one at a time. It holds one host process, which ends with it or with this process."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises ConfigError, with the kernel's reason, where nothing confines a program at this level."""
        self.config = config
        self._lock = threading.Lock()
        self._num_asked = 0
        self._host: subprocess.Popen[bytes] | None = None
        self.confined_by = self._start()
        if self.run("print(6 * 7)").stdout != "42\n":
            raise ConfigError(
                f"sandbox.level={config.level!r}: a program that prints 42 fails under {self.confined_by}"
            )
        if config.level == "none":
            _log.warning("sandbox.level=none: programs of the model run unconfined, as the user who started this run")

    def run(
        self, program: str, *, stdin: str = "", wall_s: float = float("inf"), output_bytes: int | None = None
    ) -> Ran:
        """As a script. `output_bytes` replaces the configured limit where it is larger. Raises WorkerError where it cannot be run."""
        most = max(self.config.output_bytes, output_bytes or 0)
        with _memory(stdin, "", "", program) as files:
            (end,) = self._exchange([("script", files)], wall_s=wall_s, output_bytes=most)
            verdict, detail = self._verdict(end)
            stdout, stderr = (_text(descriptor) for descriptor in files[1:3])
            if verdict is not Verdict.OUT_OF_TIME and max(os.fstat(each).st_size for each in files[1:3]) >= most:
                verdict, detail = Verdict.CRASHED, f"more than {most} bytes of output"
        return Ran(verdict=verdict, stdout=stdout, detail=f"{detail}\n{stderr[-500:]}".strip())

    def ask(self, program: str, questions: Sequence[str], *, output_bytes: int | None = None) -> list[Answer]:
        """Answers to `questions`, expressions or statements that use what the program defines, in order.

        The program answers from a process of its own by plain values, so it decides nothing else. A statement that fails an assertion is
        `wrong`, one that raises anything else `crashed`. `output_bytes` of all values together replaces the configured limit where it is
        larger. Raises WorkerError where it cannot be run.
        """
        asked, asking = os.pipe()
        answered, answering = os.pipe()
        texts = ("", "", "", program, "", "", "", json.dumps(list(questions)), "")
        with _memory(*texts) as files:
            served = [*files[:4], asked, answering]
            testing = [*files[4:8], answered, asking, files[8]]
            ends = self._exchange(
                [("serve", served), ("test", testing)],
                wall_s=self.config.total_s,
                output_bytes=max(self.config.output_bytes, output_bytes or 0),
                lent=(asked, asking, answered, answering),
            )
            lines = _text(files[8]).splitlines(keepends=True)
        answers = [_answer(line) for line in lines if line.endswith("\n")]
        if len(answers) < len(questions):
            verdict, detail = self._verdict(ends[1])
            if verdict is Verdict.OK:
                verdict, detail = self._verdict(ends[0])
            if verdict is Verdict.OK:
                verdict, detail = Verdict.CRASHED, "the program ended before its tests did"
            answers += [Answer(verdict=verdict, detail=detail)] * (len(questions) - len(answers))
        return answers

    def close(self) -> None:
        if self._host is not None:
            self._connection.close()
            self._host.kill()
            self._host.wait()
            self._host = None

    def _exchange(
        self,
        processes: Sequence[tuple[str, Sequence[int]]],
        *,
        wall_s: float,
        output_bytes: int,
        lent: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """How the processes ended; `lent` descriptors are closed here as soon as they are handed on."""
        limits = self.config
        bounds = Bounds(
            time_s=limits.time_s,
            wall_s=min(_WALL * limits.time_s, wall_s),
            memory_bytes=limits.memory_bytes,
            output_bytes=output_bytes,
        )
        request = {"bounds": asdict(bounds), "processes": [(role, len(files)) for role, files in processes]}
        with self._lock:
            self._num_asked += 1
            request["number"] = self._num_asked
            try:
                if self._host is None or self._host.poll() is not None:
                    self._start()
                self._connection.settimeout(bounds.wall_s + _ANSWER_S)
                files = [descriptor for _, files in processes for descriptor in files]
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                for descriptor in lent:
                    os.close(descriptor)
                lent = ()
                number, ends = json.loads(self._connection.recv(2**16) or "[0, null]")
                why = "it answers another request" if number else "it ended"
            except OSError as error:
                number, ends, why = 0, [], str(error)
            finally:
                for descriptor in lent:
                    os.close(descriptor)
            if number != request["number"]:
                self.close()
                raise WorkerError(
                    f"sandbox_failed: the process that starts programs does not answer: {why}", stage="sandbox"
                )
        return ends

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
                "sandbox_failed: the program was killed from outside: no memory left here?", stage="sandbox"
            )
        if code:
            return Verdict.CRASHED, f"exit code {code}"
        return Verdict.OK, ""

    def _start(self) -> str:
        """Starts the host process; what it confines programs by, in words. Raises ConfigError where that is nothing."""
        level, reasons = self.config.level, []
        if level in ("auto", "bwrap"):
            if bwrap := shutil.which("bwrap"):
                try:
                    found = self._start_host([bwrap, *_namespaces(self._readable())])
                    return ", ".join(["bubblewrap", *_landlock(found), "seccomp"])
                except WorkerError as error:
                    reasons.append(f"bubblewrap: {error}")
            else:
                reasons.append("bubblewrap: not installed")
        if level != "bwrap":
            found = self._start_host([])
            if level == "none":
                return "nothing"
            if landlock := _landlock(found):
                return ", ".join([*landlock, "seccomp"])
            reasons.append(found["refusal"])
        self.close()
        raise ConfigError(
            f"sandbox.level={level!r}: nothing confines programs here (kernel {os.uname().release}): {'; '.join(reasons)}; "
            "Landlock is in kernels from 5.13, where it stands in lsm= at boot and no container forbids it; install bubblewrap, or "
            "write level: none to run programs of the model as you"
        )

    def _start_host(self, prefix: Sequence[str]) -> dict[str, Any]:
        self.close()
        config = self.config
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = {
            "control": theirs.fileno(),
            "readable": [*self._readable(), *_DEVICES],
            "imports": [*_IMPORTED, *config.imports],
            "search": _site_packages() if config.imports else [],
            "filtered": config.level != "none",
        }
        command = [
            os.path.realpath(sys.executable),
            "-s",
            "-S",
            "-P",
            "-c",
            _START.format(str(_ROOT)),
            json.dumps(arguments),
        ]
        with _memory("") as (errors,), theirs:
            self._host = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._connection = ours
            ours.settimeout(_START_S)
            try:
                found = ours.recv(2**16)
            except OSError:
                found = b""
            if not found:
                self.close()
                raise WorkerError(f"does not start: {_text(errors).strip()[-500:]}", stage="sandbox")
        return json.loads(found)

    def _readable(self) -> list[str]:
        """Libraries; and site-packages where programs may use some of it."""
        own = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
        return [*_READABLE, *own, *(_site_packages() if self.config.imports else ())]


def _namespaces(readable: Sequence[str]) -> list[str]:
    """Arguments of bubblewrap: no network, no other process, no file but these, and none to write."""
    shown = [*readable, f"{sys.base_prefix}/bin", str(_ROOT / "actors")]
    files = [word for path in shown for word in ("--ro-bind-try", path, path)]
    devices = [word for path in _DEVICES for word in ("--dev-bind", path, path)]
    return ["--unshare-all", "--new-session", *files, *devices, "--proc", "/proc", "--remount-ro", "/"]


def _landlock(found: dict[str, Any]) -> list[str]:
    return [f"Landlock {found['landlock']}"] if found["landlock"] else []


def _site_packages() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _answer(line: str) -> Answer:
    try:
        status, said = json.loads(line)
        if status == "ok":
            return Answer(verdict=Verdict.OK, value=decode(said, [].__getitem__))
    except Exception:  # noqa: BLE001 - the program chose the value, and how deep it is
        return Answer(verdict=Verdict.CRASHED, detail="not a plain value")
    kind = said.partition(":")[0]
    reasons = {"AssertionError": Verdict.WRONG, "MemoryError": Verdict.OUT_OF_MEMORY}
    return Answer(verdict=reasons.get(kind, Verdict.CRASHED), detail=said)


@contextlib.contextmanager
def _memory(*texts: str) -> Iterator[list[int]]:
    """Files in memory with these texts. No other process finds them, and they are gone with their descriptors."""
    files = [os.memfd_create("program") for _ in texts]
    try:
        for descriptor, text in zip(files, texts, strict=True):
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(text.encode(errors="replace"))
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield files
    finally:
        for descriptor in files:
            os.close(descriptor)


def _text(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read().decode(errors="replace")

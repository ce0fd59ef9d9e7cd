"""`treadwheel` as a process of its own: what it says, what it writes, what it leaves behind."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from cluster.remote.forked_worker import ADDRESS
from tests.integration.waiting import until

ROOT = Path(__file__).parents[2]
QUICKSTART = "deploy/runs/quickstart.yaml"
SMALL = (
    "buffer.groups_per_step=8",
    "evaluation.num_prompts=16",
    "rollout.kv_cache_bytes=67108864",
    "metrics.sinks=[console, jsonl]",
)
"""Overrides of the quickstart: steps of a fraction of a second, everything else as it is."""
_LONGEST_S = 1500
"""A command that takes longer never ends: the machine may be busy."""
_NUM_TOLD = 40
"""Events."""
_BIN = str(Path(sys.executable).parent)
_MARK = "LC_TREADWHEEL_TEST_MARK"
"""A variable that all processes of a command inherit, so that they can be told from everybody else's. Those that run a user's code get few
variables: the ones of the language are among them."""


def treadwheel(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the installed command to its end, in the repository root. A run's actors are forked of what has imported for all tests."""
    return run(f"{_BIN}/treadwheel", *map(str, arguments), env={**imported_once(), **(env or {})})


def imported_once() -> dict[str, str]:
    """What tells a run of the process that imports for all tests, where there is one."""
    return {name: os.environ[name] for name in (ADDRESS,) if name in os.environ}


def run(*command: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    own = {**environment(), **(env or {})}
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=_LONGEST_S, check=False)


def environment() -> dict[str, str]:
    """Ours, with our commands on the PATH and without a cluster that a shell may have named. A run imports for itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != ADDRESS}
    return {**kept, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}


class Background:
    """A command that runs while the test looks on. Ctrl-C and a hang-up reach its whole process group, as a terminal's do."""

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
        self._mark = secrets.token_hex(8)
        self._arguments = [str(argument) for argument in arguments]
        with tempfile.NamedTemporaryFile(delete=False) as output:
            self._output = Path(output.name)
            self._process = subprocess.Popen(
                [f"{_BIN}/treadwheel", *self._arguments],
                cwd=cwd,
                env={**environment(), **(env or {}), _MARK: self._mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._living():
            with contextlib.suppress(psutil.NoSuchProcess):  # many end by themselves, at this moment
                process.kill()
        self._process.wait()
        self._output.unlink()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        until(condition, process=self)

    def assert_runs(self) -> None:
        assert self._process.poll() is None, f"ended with {self._process.returncode} too early:\n{self.output}"

    def press_ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        os.killpg(self._process.pid, signal.SIGHUP)

    def time_out(self) -> None:
        """As the command `timeout` does."""
        os.killpg(self._process.pid, signal.SIGTERM)

    def terminate(self) -> None:
        """As Kubernetes does: the command alone is told."""
        self._process.terminate()

    def send(self, number: signal.Signals) -> None:
        """To the command alone."""
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(timeout=_LONGEST_S)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def last_words(self) -> str:
        """What it said, and the last events of the run that it drives."""
        folders = [word.removeprefix("run_dir=") for word in self._arguments if word.startswith("run_dir=")]
        events = [Path(folder) / "events.jsonl" for folder in folders]
        told = [line for file in events if file.exists() for line in file.read_text().splitlines()[-_NUM_TOLD:]]
        return "\n".join([self.output, *told])

    def living(self) -> list[str]:
        """Names of its processes, its own among them."""
        return [name for process in self._living() if (name := _name_of(process))]

    def left_behind(self) -> list[str]:
        """Processes that it started and that live on, a moment after its end."""
        _, alive = psutil.wait_procs(self._living(), timeout=240)
        return [str(process) for process in alive]

    def _living(self) -> list[psutil.Process]:
        """A long title covers a process's environment; such a process is one of the command's session."""
        processes = psutil.process_iter()
        return [each for each in processes if _mark_of(each) == self._mark or _session_of(each) == self._process.pid]


def command_line(process: psutil.Process) -> str:
    """Empty for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _name_of(process: psutil.Process) -> str | None:
    try:
        return process.name()
    except psutil.Error:
        return None


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None

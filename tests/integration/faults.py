"""A real run, small enough to be killed many times: start it, hurt it, read what it left behind.

What is hurt was started by the test: pids come from the run's own events, and are checked to be actors before they are signalled.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import posixpath
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import yaml

from cluster.contracts.config import RunConfig
from cluster.record.ledger import Ledger
from cluster.record.recorder import learned_of
from cluster.record.run_directory import CHECKPOINT_MANIFEST, SUMMARY, RunDirectory, checkpoint_name
from deploy.reports import run_info, verify
from tests.integration.commands import Background, treadwheel
from tests.integration.shared import shared_folder
from tests.integration.waiting import Watched, until
from tests.models import make_tiny_model

ACTORS = ("rollout-0", "reward", "reference", "recorder", "learner-0")
"""One of each kind."""
_QUIET_START_S = 20.0
"""From the launch until all actors of `write_run` serve."""
_NOT_MATHEMATICS = (
    *("time", "speed/", "buffer/", "engine/", "weights/", "rollout/", "supervision/", "cost/"),
    # A step that is learned again does not tell them; the failures are those of a selection's candidates.
    *("staleness/bound", "reward/num_errors", "reward/num_timeouts"),
)
"""Metrics that say how long, how fast, or who was there. All others of a deterministic run are equal whenever it is repeated."""
_WHERE_AND_WHEN = ("run_id", "worker", "model_seconds", "started_at", "finished_at")
"""Columns of trajectories that say no more than that."""


def write_run(folder: Path, model: Path, **settings: Any) -> Path:
    """A run file on the random `model`: deterministic, on-policy, steps of a fraction of a second; `settings` go on top."""
    run = {
        "num_steps": 12,
        "deterministic": True,
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 200, "seed": 1},
        "reward": {"judge": "tests.integration.judges:digit_share"},
        "sampling": {"max_tokens": 24},
        "buffer": {"groups_per_step": 4, "trajectories_per_group": 4},
        "rollout": {"num_threads": 1, "cpus_per_worker": 0.5, "kv_cache_bytes": 64 * 1024**2},
        "learner": {"num_threads": 1},
        "reference": {"num_threads": 1},
        "algorithm": {"kl": {"loss": {"coefficient": 0.01}}},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 3},
        "supervision": {"heartbeat_s": 1, "start_s": 1200},
        "metrics": {"sinks": ["jsonl"]},
    }
    for name, value in settings.items():
        section, _, key = name.partition("__")
        if key:
            run.setdefault(section, {})[key] = value
        else:
            run[section] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def write_endless_run(folder: Path, model: Path, **settings: Any) -> Path:
    """`write_run` of one that goes on until it is stopped, with workers a step ahead of the learner; `settings` go on top."""
    ahead = {"groups_per_step": 4, "trajectories_per_group": 4, "max_off_policy_steps": 1}
    endless = {"num_steps": 100_000, "deterministic": False, "algorithm": {}, "buffer": ahead}
    return write_run(folder, model, **endless | settings)


def undisturbed_run(factory: pytest.TempPathFactory) -> tuple[Path, "Run"]:
    """(run file, a run of it that nobody hurt): one for all tests that compare with it. Its steps make four updates
    on trajectories that were chosen among more."""
    return _undisturbed(shared_folder(factory) / "undisturbed")


@functools.cache
def _undisturbed(folder: Path) -> tuple[Path, "Run"]:
    folder.mkdir(exist_ok=True)
    run, file = Run(folder / "run"), folder / "run.yaml"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process makes it, the others wait for it
        if not (folder / "run" / SUMMARY).exists():
            updates = {"learner__epochs": 2, "learner__mini_batches": 2, "algorithm__proximal": "recompute"}
            chosen = {"rollout__extra_trajectories": 2, "algorithm__selection": "max_variance"}
            run.to_end(write_run(folder, make_tiny_model(folder / "model"), **updates, **chosen))
    return file, run


class Run:
    """A run directory, and the driver that works on it at the moment."""

    def __init__(self, directory: Path | str) -> None:
        """`directory` is a path, or a URL."""
        self.path = directory
        self.directory = RunDirectory(str(directory))

    def start(self, file: Path, *overrides: str) -> Background:
        return Background("train", file, f"run_dir={self.path}", *overrides)

    def to_end(self, file: Path, *overrides: str) -> "Run":
        """Runs it undisturbed."""
        ended = treadwheel("train", file, f"run_dir={self.path}", *overrides)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return self

    # What it says while it runs

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = self.directory.read_json_lines("events.jsonl")
        return [event for event in found if event["kind"] in kinds] if kinds else found

    def num_steps(self) -> int:
        return max(self.metrics(), default=0)

    def num_recorded(self) -> int:
        return len(self.directory.read_records())

    def samplers(self) -> set[str]:
        """Workers whose groups the last steps consumed; of a run on a disk."""
        workers: set[str] = set()
        for file in sorted((Path(self.path) / "trajectories").glob("*.arrow"))[-3:]:
            with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
                workers |= set(reader.read_all()["worker"].to_pylist())
        return workers

    def pid(self, actor: str) -> int | None:
        """Of the living actor; None while another one comes up."""
        pid: int | None = None
        for event in self.events("started", "recovery", "worker_joined", "failure", "hang"):
            if event["kind"] == "started":
                pid = event["actors"].get(actor)
            elif event.get("failure") == "termination":  # it leaves, and lives on for a while
                continue
            elif event["actor"] == actor:
                pid = None if event["kind"] in ("failure", "hang") else event["actor_pid"]
        if pid is None or is_actor(pid):
            return pid
        print(f"process {pid} of {actor} is called {_title(pid)!r}")  # seen where a test fails of it
        return None

    def strike(self, actor: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Sends a signal to the actor; its pid, None when it was not there."""
        pid = self.pid(actor)
        with contextlib.suppress(ProcessLookupError):  # it may end by itself at this moment
            if pid is not None:
                os.kill(pid, number)
                return pid
        return None

    def kill_driver(self) -> None:
        pid = self.events("launched")[-1]["pid"]
        assert "treadwheel" in " ".join(psutil.Process(pid).cmdline())
        os.kill(pid, signal.SIGKILL)

    # What it left behind

    def config(self) -> RunConfig:
        return run_info.config_of(self.directory)

    def problems(self) -> tuple[str, ...]:
        return verify.verify(self.directory, self.config()).problems

    def metrics(self) -> dict[int, dict[str, Any]]:
        """By step; a step learned again replaces its line."""
        lines = self.directory.read_json_lines("metrics.jsonl")
        return {line["policy_version"]: line for line in lines if "reward/mean" in line}

    def whole_steps(self) -> list[dict[str, Any]]:
        """Their metrics, without the step that Ctrl-C may have cut short: it is learned and recorded, and its weights are not sent."""
        return [numbers for numbers in self.metrics().values() if "time/step_s" in numbers]

    def phases(self) -> dict[str, list[dict[str, Any]]]:
        """Of each actor, in their order."""
        lines = sorted(self.directory.read_json_lines("phases.jsonl"), key=lambda line: line["start"])
        return {
            actor: [line for line in lines if line["actor"] == actor] for actor in {line["actor"] for line in lines}
        }

    def mathematics(self) -> dict[int, dict[str, Any]]:
        return {
            step: {name: value for name, value in numbers.items() if not name.startswith(_NOT_MATHEMATICS)}
            for step, numbers in self.metrics().items()
        }

    def trajectories(self) -> dict[int, pa.Table]:
        """By step, those that the ledger names, without what says where and when."""
        tables: dict[int, pa.Table] = {}
        for record in Ledger(self.directory).records():
            with pa.ipc.open_file(self.directory.read_file(record.trajectories)) as reader:
                tables[record.step] = reader.read_all().drop_columns([*_WHERE_AND_WHEN])
        return tables

    def learned(self) -> dict[int, pa.Table]:
        """The record of learning by step."""
        tables: dict[int, pa.Table] = {}
        for record in Ledger(self.directory).records():
            if learned := learned_of(self.directory, record.trajectories):
                assert learned.policy_version == record.step - 1
                tables[record.step] = pa.Table.from_batches([learned.rows])
        return tables

    def weights(self) -> dict[int, str]:
        """Digest of the weights that each step published."""
        return {event["policy_version"]: event["digest"] for event in self.events("published", "broadcast")}

    def checkpoint(self, step: int) -> dict[str, str]:
        """Digest of each tensor file."""
        checkpoint = f"checkpoints/{checkpoint_name(step)}"
        manifest = json.loads(self.directory.read_text(f"{checkpoint}/{CHECKPOINT_MANIFEST}"))
        folder = posixpath.join(checkpoint, manifest.get("folder", ""))
        names = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
        return {name: hashlib.sha256(self.directory.read_file(f"{folder}/{name}")).hexdigest() for name in names}

    def groups(self) -> list[tuple[int, ...]]:
        """Of each step, as the ledger says."""
        return [tuple(json.loads(line)["groups"]) for line in self.directory.read_records()]

    def replay(self, *options: object) -> str:
        """What `treadwheel replay` says. On a Ray of its own: one started here would leave RAY_AUTH_MODE to all that come later."""
        done = treadwheel("replay", self.path, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def slowness(self) -> float:
        """How many times as long as on a quiet machine its actors took to start, and at least 1."""
        launched, started = (self.events(kind)[0]["time"] for kind in ("launched", "started"))
        return max(1.0, (started - launched) / _QUIET_START_S)

    def has_recovered(self, actor: str) -> bool:
        """Another one has served in its place, at least once."""
        return any(event["actor"] == actor for event in self.events("recovery"))

    def recovery_seconds(self) -> dict[str, list[float]]:
        """By actor kind, from the failure that was noticed to the replacement that serves."""
        found: dict[str, list[float]] = {}
        for event in self.events("recovery"):
            found.setdefault(event["actor_kind"], []).append(event["seconds"])
        return found


def assert_equal_bit_for_bit(
    run: Run,
    other: Run,
    *,
    steps: Sequence[int],
    published: Sequence[int] | None = None,
    checkpoint: int | None = None,
) -> None:
    """Trajectories, record of learning, mathematics and published weights of `steps`, and the tensors of one checkpoint.

    `published` are the steps whose weights both runs' events tell of; None for all.
    """
    ours, theirs = run.trajectories(), other.trajectories()
    for step in steps:
        assert ours[step].equals(theirs[step]), f"trajectories of step {step} differ"
    assert {step: table for step, table in run.learned().items() if step in steps} == {
        step: table for step, table in other.learned().items() if step in steps
    }
    for step in steps:
        left, right = run.mathematics()[step], other.mathematics()[step]
        assert left == right, {name: (left[name], right.get(name)) for name in left if left[name] != right.get(name)}
    told = steps if published is None else published
    assert [run.weights()[step] for step in told] == [other.weights()[step] for step in told]
    if checkpoint is not None:
        assert run.checkpoint(checkpoint) == other.checkpoint(checkpoint)


@contextlib.contextmanager
def slowed(run: Run, actor: str, *, still_s: float = 0.5) -> Iterator[None]:
    """While this is open the actor stands still for so long after each twentieth of a second."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.wait(0.05):
            if pid := run.strike(actor, signal.SIGSTOP):  # None while another one comes up
                is_over.wait(still_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def learner_held(run: Run, *, process: Watched) -> Iterator[None]:
    """The learner stands still, and the groups that it may be given next wait for it. One that is stopped while it sends weights would
    hold up the workers too: it is let go, and stopped again."""
    until(functools.partial(_is_held, run), process=process)
    try:
        yield
    finally:
        run.strike("learner-0", signal.SIGCONT)


def stand_still_in_mid_broadcast(run: Run, worker: str, *, while_newer: str, process: Watched) -> None:
    """At a moment when another actor has a version that no broadcast brought to all. The groups of the step after it are there when the
    worker is stopped: else the learner would wait for those of this worker, and nobody would get a new version."""
    with learner_held(run, process=process):
        assert run.strike(worker, signal.SIGSTOP)
    until(lambda: _version(run, while_newer) > run.events("broadcast")[-1]["policy_version"], process=process)


def _version(run: Run, actor: str) -> int:
    """That it serves, and maybe alone: a broadcast is told when all have it, or are lost."""
    status = json.loads(run.directory.read_text("status.json"))
    return next((each["policy_version"] for each in status["actors"] if each["actor"] == actor), 0)


def _is_held(run: Run) -> bool:
    since = time.time()
    if not run.strike("learner-0", signal.SIGSTOP):
        return False
    while time.time() < since + 15:
        if _is_idle(run, since=since + 2):
            return True
        time.sleep(0.2)
    run.strike("learner-0", signal.SIGCONT)
    return False


def _is_idle(run: Run, *, since: float) -> bool:
    """Whoever makes groups has had nothing left to do at that time."""
    status = json.loads(run.directory.read_text("status.json"))
    makers = {each["phase"] for each in status["actors"] if each["actor"].startswith(("rollout-", "reward"))}
    return status["time"] > since and makers - {"starting"} == {"idle"}


def is_actor(pid: int) -> bool:
    return any(title.startswith("ray::") for title in _title(pid))


def _title(pid: int) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).cmdline()[:1]
    return []

"""`treadwheel replay`: learns a run's recorded trajectories again, without sampling, and compares the weights with the run's.

With `--learned` it writes the record of learning of one step, for all its groups, even if the run recorded fewer.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cluster.contracts.config import CheckpointConfig, RunConfig, WeightsConfig
from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.learned import written_learned
from cluster.contracts.protocols import PublishingLearner
from cluster.learner_group import LearnerGroup
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.recorder import learned_name, num_pruned_steps
from cluster.record.run_directory import CHECKPOINTS, EVENTS, PASSPORT, RUN_YAML, TRAJECTORIES, RunDirectory
from cluster.record.storage import Storage
from cluster.weights.broadcast import Weights
from deploy.cluster_up.connection import connected
from deploy.cluster_up.start_up import learner_alone
from deploy.cluster_up.stopping import Stop, until_interrupted
from deploy.reports.provenance import RunProvenance
from deploy.versions import versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    num_steps: int
    digest: str
    """Digest of the replay's weights."""
    recorded_digest: str | None
    """Digest of the weights that the run published after that step; None: the run published none."""
    moved: tuple[str, ...] = ()
    """Settings that a command changed on the run's way, and that may change the digest."""
    others: tuple[str, ...] = ()
    """Packages, and the learner's processor, that the run had and this replay has not: they may round differently."""

    @property
    def differs(self) -> bool:
        return self.recorded_digest not in (None, self.digest)

    @property
    def verdict(self) -> str:
        if self.recorded_digest is None:
            return f"the run has no digest of step {self.num_steps} to compare with"
        if not self.differs:
            return "equal"
        reasons = ""
        if self.moved:
            reasons += (
                f"; it changed {', '.join(self.moved)} on its way, so steps learned with other values than those of its {RUN_YAML} may "
                "differ although nothing was altered"
            )
        if self.others:
            reasons += f"; it was computed with {', '.join(self.others)}, which may round differently"
        return f"not equal: the run published {self.recorded_digest}{reasons}"


def replay(
    run_dir: RunDirectory,
    config: RunConfig,
    *,
    to_step: int | None = None,
    out: str | None = None,
    address: str | None = None,
    stop: Stop | None = None,
) -> Replay:
    """Replays the first `to_step` steps, or all by default, and writes the weights to `out` as a Hugging Face folder. `stop` stops it.

    Raises ConfigError for a step that was not recorded and for an `out` that exists; LedgerError if the trajectories differ from the
    ledger; CheckpointError if the run started from a checkpoint that was altered since.
    """
    ledger = _first_steps(run_dir, to_step, option="--to-step")
    _refuse_missing(run_dir, ledger, first=1)
    _check_ends(config, out)
    work = _replay(config, run_dir, ledger, out=out, address=address)
    digest, chosen = asyncio.run(until_interrupted(work, stop=stop))
    return _compared(run_dir, ledger.version, digest, chosen)


def replay_learned(
    run_dir: RunDirectory, config: RunConfig, *, step: int, out: str | None = None, address: str | None = None
) -> tuple[Replay, str | None]:
    """Learns up to `step` from the newest checkpoint before it, and writes the record of learning of that step, for all its groups.

    The record goes to the file `out`, or else to the run's trajectories. Also returns its path: None, and nothing is written into the run,
    if the replay's weights differ from the run's. Raises as `replay`.
    """
    ledger = _first_steps(run_dir, step, option="--learned")
    first = 1 + max((saved for saved in run_dir.checkpoints() if saved < step), default=0)
    _refuse_missing(run_dir, ledger, first=first)
    _check_ends(config, out)
    recorded_digest = _published(run_dir.read_json_lines(EVENTS), step)
    *_, record = ledger.records()
    name = learned_name(record.trajectories)
    if out is None and recorded_digest is None and run_dir.exists(name):
        raise ConfigError(
            f"{run_dir.path(name)} was written by the run, and the run has no digest of step {step} to check a replay against; name "
            "another file with --out"
        )
    content, digest, chosen = asyncio.run(until_interrupted(_learned(config, run_dir, ledger, address=address)))
    done = _compared(run_dir, step, digest, chosen)
    if out is not None:
        folder, name = os.path.split(os.path.abspath(out))
        Storage(folder).write_file(name, content)
    elif not done.differs:
        run_dir.write_file(name, content)
        out = run_dir.path(name)
    return done, out


async def _replay(
    config: RunConfig, run_dir: RunDirectory, ledger: Ledger, *, out: str | None, address: str | None
) -> tuple[str, Mapping[str, str]]:
    """(digest of the weights after the ledger's last step, the learner's choices)."""
    # An empty folder of checkpoints: every step is learned again.
    with tempfile.TemporaryDirectory() as empty:
        async with _learned_again(config, run_dir, ledger, checkpoints=empty, address=address) as learner:
            if out is not None:
                await learner.export(os.path.abspath(out))
            return await weights_digest(config.weights, learner), learner.chosen


async def _learned(
    config: RunConfig, run_dir: RunDirectory, ledger: Ledger, *, address: str | None
) -> tuple[pa.Buffer, str, Mapping[str, str]]:
    """(record of learning of the ledger's last step as a file, then as `_replay`)."""
    config = config.model_copy(update={"record": config.record.model_copy(update={"learned_groups": None})})
    checkpoints = run_dir.path(CHECKPOINTS)
    async with _learned_again(config, run_dir, ledger, checkpoints=checkpoints, address=address) as learner:
        parts = [await part for part in await learner.learned()]
        content = written_learned(parts, policy_version=ledger.version - 1)
        return content, await weights_digest(config.weights, learner), learner.chosen


@contextlib.asynccontextmanager
async def _learned_again(
    config: RunConfig, run_dir: RunDirectory, ledger: Ledger, *, checkpoints: str, address: str | None
) -> AsyncIterator[LearnerGroup]:
    """A learner that has learned the ledger's steps again, from the newest of `checkpoints`. It saves no checkpoint."""
    never = CheckpointConfig(every_steps=None, every_s=None)
    config = config.model_copy(update={"checkpoint": never})
    alone = learner_alone(
        config,
        run_dir,
        ledger,
        MetricLog([]),
        checkpoints=checkpoints,
        provenance=RunProvenance(run_dir, identity=config.evaluation.identity).at,
        with_reference=False,
    )
    async with connected(address), alone as (learner, _):
        await learner.restore()
        yield learner


async def weights_digest(config: WeightsConfig, learner: PublishingLearner) -> str:
    """Digest of the learner's weights as the run's transport publishes them."""
    weights = Weights.from_config(config, learner=learner, num_workers=0, events=MetricLog([]))
    return (await weights.publish()).digest


def _first_steps(run_dir: RunDirectory, last: int | None, *, option: str) -> Ledger:
    """The ledger up to the step that `option` names. Raises ConfigError for a step that was not recorded."""
    num_recorded = Ledger(run_dir).version
    last = num_recorded if last is None else last
    if not 1 <= last <= num_recorded:
        raise ConfigError(f"{option}={last}: {run_dir.url!r} recorded steps 1 to {num_recorded}; choose one of them")
    return Ledger(run_dir, num_steps=last)


def _refuse_missing(run_dir: RunDirectory, ledger: Ledger, *, first: int) -> None:
    """Raises ConfigError if the trajectories of a step from `first` on are missing."""
    needed = "all of them" if first == 1 else f"those from step {first} on"
    if (pruned := num_pruned_steps(run_dir)) >= first:
        raise ConfigError(
            f"{run_dir.url!r} has no trajectories of steps 1 to {pruned} any more (record.keep_trajectories); a replay needs {needed}"
        )
    there = {f"{TRAJECTORIES}/{name}" for name in run_dir.names(TRAJECTORIES)}
    for record in ledger.records():
        if record.step >= first and record.trajectories not in there:
            raise ConfigError(
                f"{run_dir.path(record.trajectories)}, which step {record.step} consumed, is not there; a replay needs {needed}: bring it "
                "back from a copy, or replay fewer steps"
            )


def _check_ends(config: RunConfig, out: str | None) -> None:
    """Raises ConfigError for an `out` that exists or is not local, CheckpointError if the starting model is an altered checkpoint's."""
    if out is not None and "://" in out:
        raise ConfigError(f"--out={out!r} is in an object store; name a local path, and copy it there")
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"--out={out!r} exists; name another one")
    from learner.checkpoint.reading import verify_model

    verify_model(Path(config.model.path))


def _published(events: Sequence[Mapping[str, Any]], version: int) -> str | None:
    found = [event for event in events if _publishes(event, version)]
    return found[-1]["digest"] if found else None


def _publishes(event: Mapping[str, Any], version: int) -> bool:
    # "published": by a resumed run that learned again before its workers started.
    return event["kind"] in ("broadcast", "published") and event["policy_version"] == version


def _compared(run_dir: RunDirectory, step: int, digest: str, chosen: Mapping[str, str]) -> Replay:
    events = run_dir.read_json_lines(EVENTS)
    return Replay(
        num_steps=step,
        digest=digest,
        recorded_digest=_published(events, step),
        moved=_moved(events),
        others=_others(run_dir, events, step, chosen),
    )


def _moved(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Settings that a later command of the run changed, and that may change the digest of a step."""
    launched = [event for event in events if event["kind"] == "launched"]
    return tuple(sorted({name for event in launched for name in event.get("moved", ())}))


def _others(
    run_dir: RunDirectory, events: Sequence[Mapping[str, Any]], step: int, chosen: Mapping[str, str]
) -> tuple[str, ...]:
    """As `Replay.others`, of the drivers until `step` was published last. Runs of earlier versions do not name all of it: that is not
    compared."""
    passport: dict[str, Any] = {}
    with contextlib.suppress(StorageError):  # an unreadable passport must not hide the verdict
        passport = run_dir.read_json(PASSPORT)
    ends = [place for place, event in enumerate(events) if _publishes(event, step)]
    events = events[: ends[-1]] if ends else events
    used = [
        passport.get("versions", {}),
        *(event.get("versions", {}) for event in events if event["kind"] == "launched"),
    ]
    learners = [passport.get("learner", {}), *(event for event in events if event["kind"] == "learner_loaded")]
    now = versions()
    pairs = [(name, each[name], now.get(name, "none")) for each in used for name in each]
    pairs += [("the processor", each["processor"], chosen["processor"]) for each in learners if "processor" in each]
    return tuple(dict.fromkeys(f"{name} {then} (now {here})" for name, then, here in pairs if then != here))

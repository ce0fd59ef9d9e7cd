"""`treadwheel replay`: learns again from what a run recorded, without sampling, and compares the weights it arrives at."""

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.contracts.config import CheckpointConfig, RunConfig, WeightsConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.protocols import PublishingLearner
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.recorder import num_pruned_steps
from cluster.record.run_directory import EVENTS, RunDirectory
from cluster.weights.broadcast import Weights
from deploy.cluster_up.connection import connected
from deploy.cluster_up.start_up import learner_alone
from deploy.cluster_up.stopping import until_interrupted
from deploy.reports.provenance import RunProvenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    num_steps: int
    digest: str
    """Of the weights that the replay arrived at."""
    recorded_digest: str | None
    """Of the weights that the run published after that step; None when it published none there."""

    @property
    def differs(self) -> bool:
        return self.recorded_digest not in (None, self.digest)

    @property
    def verdict(self) -> str:
        if self.recorded_digest is None:
            return f"the run has no digest of step {self.num_steps} to compare with"
        return f"not equal: the run published {self.recorded_digest}" if self.differs else "equal"


def replay(
    run_dir: RunDirectory,
    config: RunConfig,
    *,
    to_step: int | None = None,
    out: str | None = None,
    address: str | None = None,
) -> Replay:
    """Replays the first `to_step` steps (all, by default); `out` gets the weights as a Hugging Face folder.

    Raises ConfigError for a step that was not recorded and for an `out` that exists, LedgerError when the record is not what was
    consumed, CheckpointError when the run started from a checkpoint that is not what was saved.
    """
    from learner.checkpoint.reading import verify_model

    ledger = Ledger(run_dir)
    num_steps = ledger.version if to_step is None else to_step
    if not 1 <= num_steps <= ledger.version:
        raise ConfigError(
            f"--to-step={num_steps}: {run_dir.url!r} recorded steps 1 to {ledger.version}; choose one of them"
        )
    if pruned := num_pruned_steps(run_dir):
        raise ConfigError(
            f"{run_dir.url!r} has no trajectories of steps 1 to {pruned} any more (record.keep_trajectories); a replay needs all of them"
        )
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"--out={out!r} exists; name another folder")
    verify_model(Path(config.model.path))
    ledger = Ledger(run_dir, num_steps=num_steps)
    digest = asyncio.run(until_interrupted(_replay(config, run_dir, ledger, out=out, address=address)))
    return Replay(num_steps=num_steps, digest=digest, recorded_digest=_published(run_dir, num_steps))


async def _replay(
    config: RunConfig, run_dir: RunDirectory, ledger: Ledger, *, out: str | None, address: str | None
) -> str:
    never = CheckpointConfig(every_steps=None, every_s=None)
    config = config.model_copy(update={"checkpoint": never})
    # Without a checkpoint to start from, every step is learned again.
    with tempfile.TemporaryDirectory() as empty:
        alone = learner_alone(
            config,
            run_dir,
            ledger,
            MetricLog([]),
            checkpoints=empty,
            provenance=RunProvenance(run_dir).at,
            with_reference=False,
        )
        async with connected(address), alone as (learner, _):
            await learner.restore()
            if out is not None:
                await learner.export(os.path.abspath(out))
            return await weights_digest(config.weights, learner)


async def weights_digest(config: WeightsConfig, learner: PublishingLearner) -> str:
    """Of the learner's weights as the run's own transport publishes them."""
    weights = Weights.from_config(config, learner=learner, num_workers=0, events=MetricLog([]))
    return (await weights.publish()).digest


def _published(run_dir: RunDirectory, version: int) -> str | None:
    events = run_dir.read_json_lines(EVENTS)
    kinds = ("broadcast", "published")  # "published": where a resumed run had learned again, before it had workers
    found = [each for each in events if each["kind"] in kinds and each["policy_version"] == version]
    return found[-1]["digest"] if found else None

"""A run's directory, live or done, on a disk or in an object store, as tables."""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.schema import SCHEMA
from cluster.record.ledger import Ledger
from cluster.record.run_directory import CHECKPOINTS, EVENTS, METRICS, PASSPORT, RunDirectory

if TYPE_CHECKING:
    from deploy.replay import Replay
    from deploy.reports.summary import Summary
    from deploy.reports.verify import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    model: str
    """A Hugging Face folder: its path, or its URL in an object store."""


class Run:
    """Reads; starts and changes nothing, but for `replay`, which starts a learner. What is live is read anew at every look."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError when there is no run at `path`."""
        from deploy.reports.run_info import config_of

        self._directory = RunDirectory(path)
        self._config = config_of(self._directory)

    def __repr__(self) -> str:
        return f"treadwheel.open_run({self.path!r})"

    @property
    def path(self) -> str:
        return self._directory.path()

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def is_running(self) -> bool:
        """Whether a driver is at work."""
        return self._directory.owner() is not None

    @property
    def num_steps(self) -> int:
        """Steps that it has recorded."""
        return Ledger(self._directory).version

    @property
    def summary(self) -> "Summary":
        """What it came to so far."""
        from deploy.reports.summary import summary_of

        return summary_of(self._directory)

    @property
    def passport(self) -> dict[str, Any]:
        """What it computes, down to the last epsilon, and with which software. Empty before it has started."""
        return self._directory.read_json(PASSPORT)

    @property
    def metrics(self) -> pa.Table:
        """A row a step, its number in `policy_version`; null where a step has no such number. docs/metrics.md says what they mean."""
        lines = self._directory.read_json_lines(METRICS)
        names = dict.fromkeys(["policy_version", "time", *(name for line in lines for name in line)])
        kinds = {name: pa.int64() if name == "policy_version" else pa.float64() for name in names}
        columns = {name: pa.array([line.get(name) for line in lines], type=kind) for name, kind in kinds.items()}
        return pa.table(columns)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, in order: `kind`, `time`, and fields of each kind."""
        return self._directory.read_json_lines(EVENTS)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """In order of their steps."""
        found = self._directory.checkpoints()
        return [
            Checkpoint(step=step, model=self._directory.path(f"{CHECKPOINTS}/{name}/model"))
            for step, name in found.items()
        ]

    def trajectories(self, step: int | Collection[int] | None = None) -> pa.dataset.Dataset:
        """Of these steps, or of all whose trajectories are kept: a row a trajectory, or a segment of an episode, and the column `step`.

        Nothing is read before it is asked for: `run.trajectories().to_table(columns=["step", "reward"])`. In an object store the files of
        the steps are read at once. Raises ConfigError for a step that is not there.
        """
        from deploy.export import STEP, in_words, kept_records, step_table

        kept = {record.step: record for record in kept_records(self._directory)}
        wanted = list(kept) if step is None else [step] if isinstance(step, int) else list(step)
        if missing := [each for each in wanted if each not in kept]:
            there = in_words(list(kept.values()))
            raise ConfigError(f"step={missing[0]}: {self.path!r} has trajectories of {there}")
        schema = SCHEMA.insert(0, STEP)
        if not wanted:
            return pa.dataset.dataset(schema.empty_table())
        if not self._directory.is_local:
            return pa.dataset.dataset([step_table(self._directory, kept[each]) for each in wanted])
        return pa.dataset.FileSystemDataset.from_paths(
            [self._directory.path(kept[each].trajectories) for each in wanted],
            schema=schema,
            format=pa.dataset.IpcFileFormat(),
            filesystem=pa.fs.LocalFileSystem(),
            partitions=[pa.dataset.field(STEP.name) == each for each in wanted],
        )

    def verify(self) -> "Verdict":
        """Whether ledger, digests, schema, staleness and checkpoints are what the run says; `problems` is empty when all is well."""
        from deploy.reports.verify import verify

        return verify(self._directory, self._config)

    def replay(self, *, to_step: int | None = None, address: str | None = None) -> "Replay":
        """Learns again from the record, all of it or the first steps, and compares the weights. Raises as `treadwheel replay`."""
        from deploy.cluster_up.stopping import Stop
        from deploy.replay import replay
        from treadwheel.training import beside_a_loop

        work = functools.partial(replay, self._directory, self._config, to_step=to_step, address=address)
        return beside_a_loop(work, Stop())


def open_run(path: str) -> Run:
    """The run in a run directory, live or done, on a disk or `s3://bucket/run`. Raises ConfigError when there is none."""
    return Run(path)

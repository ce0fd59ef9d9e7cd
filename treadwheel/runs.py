"""A run's directory as tables. The run may be live or finished, on a disk or in an object store."""

import functools
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import pyarrow as pa
import pyarrow.dataset

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.schema import SCHEMA
from cluster.record.ledger import Ledger
from cluster.record.run_directory import CHECKPOINTS, EVENTS, PASSPORT, RunDirectory
from cluster.sinks.jsonl import read_lines

if TYPE_CHECKING:
    from deploy.replay import Replay
    from deploy.reports.summary import Summary
    from deploy.reports.verify import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    model: str
    """Path or URL of a Hugging Face folder."""


class Run:
    """Reads a run and changes nothing. A live run's data is read anew at each access. Only `replay` starts actors: a learner."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if there is no run at `path`."""
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
        """Whether a driver is running it."""
        return self._directory.owner() is not None

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return Ledger(self._directory).version

    @property
    def summary(self) -> "Summary":
        """Rewards, scores, tokens and seconds so far."""
        from deploy.reports.summary import summary_of

        return summary_of(self._directory)

    @property
    def passport(self) -> dict[str, Any]:
        """The run's formulas down to the last epsilon, and its software versions. Empty before it has started."""
        return self._directory.read_json(PASSPORT)

    @property
    def metrics(self) -> pa.Table:
        """One row for each step, whose number is `policy_version`; null where a step lacks a metric. docs/metrics.md explains them."""
        lines = read_lines(self._directory)
        names = dict.fromkeys(["policy_version", "time", *(name for line in lines for name in line)])
        kinds = {name: pa.int64() if name == "policy_version" else pa.float64() for name in names}
        columns = {name: pa.array([line.get(name) for line in lines], type=kind) for name, kind in kinds.items()}
        return pa.table(columns)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in order: `kind`, `time`, and fields of each kind."""
        return self._directory.read_json_lines(EVENTS)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """In order of steps."""
        found = self._directory.checkpoints()
        return [
            Checkpoint(step=step, model=self._directory.path(f"{CHECKPOINTS}/{name}/model"))
            for step, name in found.items()
        ]

    def trajectories(self, step: int | Collection[int] | None = None) -> pa.dataset.Dataset:
        """Trajectories of these steps, by default of all that are kept: one row for each trajectory or segment, with a column `step`.

        Data is read when used: `run.trajectories().to_table(columns=["step", "reward"])`. From an object store the steps' files are read at
        once. Raises ConfigError for a step whose trajectories are not kept, and for a `step` that is no number.
        """
        from deploy.export import STEP, in_words, kept_records, step_table

        kept = {record.step: record for record in kept_records(self._directory)}
        wanted = list(kept) if step is None else _numbers(step)
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
        """Checks ledger, digests, schema, staleness and checkpoints. `problems` of the result is empty if all are as recorded."""
        from deploy.reports.verify import verify

        return verify(self._directory, self._config)

    def replay(self, *, to_step: int | None = None, address: str | None = None) -> "Replay":
        """Learns the recorded steps, up to `to_step`, again and compares the weights. Raises the errors of `treadwheel replay`."""
        from deploy.cluster_up.stopping import Stop
        from deploy.replay import replay
        from treadwheel.training import beside_a_loop

        stop = Stop()
        work = functools.partial(replay, self._directory, self._config, to_step=to_step, address=address, stop=stop)
        return beside_a_loop(work, stop)


def _numbers(step: object) -> list[int]:
    several = step if isinstance(step, Iterable) and not isinstance(step, str) else [step]
    try:
        return [operator.index(each) for each in cast("Iterable[SupportsIndex]", several)]
    except TypeError as error:
        raise ConfigError(f"step={step!r} is no number of a step; give a whole number, or several in a list") from error


def open_run(path: str) -> Run:
    """The run in a run directory, live or finished, on a disk or at `s3://bucket/run`. Raises ConfigError if there is none."""
    return Run(path)

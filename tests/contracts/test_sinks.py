"""Every metric sink keeps the protocol's promises. A new file below cluster/sinks is found; `_REWARDS` must say how to read it."""

import contextlib
import io
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cluster.contracts.config import MetricsConfig
from cluster.contracts.plugins import SINKS, Plugin, names
from cluster.metrics import Sink, resolve_sink
from cluster.record.run_directory import RunDirectory
from cluster.sinks import ray
from cluster.sinks.jsonl import read_steps
from tests import tracker_files


class ListedGauge:
    """Stands in for Ray's, which only Prometheus reads."""

    values: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, **_: object) -> None:
        self._name = name

    def set(self, value: float, **_: object) -> None:
        self.values[self._name] = value


class Run:
    """A run directory, the sink of a driver on it, and what came out of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._output = io.StringIO()
        self.sink = self.resumed()

    def resumed(self) -> Sink:
        """The sink of the next driver."""
        make = resolve_sink(MetricsConfig(sinks=(Plugin(name=self._name),)), 0)
        with contextlib.redirect_stdout(self._output):
            self.sink = make(directory=RunDirectory(str(self._folder)), num_steps=10)
        return self.sink

    def rewards(self) -> dict[int, float]:
        """Policy version -> mean reward, as a reader sees it once the driver is gone."""
        self.sink.close()
        return _REWARDS[self._name](self)

    def of_console(self) -> dict[int, float]:
        lines = re.findall(r"^step (\d+)/10  reward ([\d.]+)", self._output.getvalue(), re.MULTILINE)
        return {int(version): float(reward) for version, reward in lines}

    def of_jsonl(self) -> dict[int, float]:
        return {version: said["reward/mean"] for version, said in read_steps(RunDirectory(str(self._folder))).items()}

    def of_tensorboard(self) -> dict[int, float]:
        read = EventAccumulator(str(self._folder / "tensorboard")).Reload()
        events = read.Scalars("reward/mean") if "reward/mean" in read.Tags()["scalars"] else []
        assert len({event.step for event in events}) == len(events), "a step is drawn once"
        return {event.step: event.value for event in events}

    def of_ray(self) -> dict[int, float]:
        gauges = ListedGauge.values
        return {int(gauges["treadwheel_policy_version"]): gauges["treadwheel_reward_mean"]} if gauges else {}

    def of_mlflow(self) -> dict[int, float]:
        store = self._folder / "mlflow.db"
        if not store.exists():
            return {}
        with contextlib.closing(sqlite3.connect(store)) as database:
            (num_runs,) = database.execute("select count(*) from runs").fetchone()
            assert num_runs <= 1, "one run"
            rows = "select step, value from metrics where key = 'reward/mean' order by timestamp"
            return dict(database.execute(rows).fetchall())

    def of_trackio(self) -> dict[int, float]:
        from trackio.sqlite_storage import SQLiteStorage

        runs = SQLiteStorage.get_runs("treadwheel")
        assert len(runs) <= 1, "one run"
        logs = SQLiteStorage.get_logs("treadwheel", runs[0]) if runs else []
        return {row["policy_version"]: row["reward/mean"] for row in logs if "reward/mean" in row}

    def of_wandb(self) -> dict[int, float]:
        import wandb

        wandb.teardown()  # its own process writes the file, some milliseconds after the run is finished
        return {row["policy_version"]: row["reward/mean"] for row in tracker_files.wandb_rows(self._folder)}

    def of_swanlab(self) -> dict[int, float]:
        return tracker_files.swanlab_numbers(self._folder, "reward/mean")


_REWARDS: dict[str, Callable[[Run], dict[int, float]]] = {
    "console": Run.of_console,
    "jsonl": Run.of_jsonl,
    "mlflow": Run.of_mlflow,
    "ray": Run.of_ray,
    "swanlab": Run.of_swanlab,
    "tensorboard": Run.of_tensorboard,
    "trackio": Run.of_trackio,
    "wandb": Run.of_wandb,
}


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory) -> Path:
    """Without a run: MLflow takes seconds to make the tables of a new one."""
    import mlflow

    store = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}").search_experiments()
    return store


@pytest.fixture(params=names(SINKS))
def run(request, tmp_path, monkeypatch) -> Run:
    monkeypatch.setattr(ray, "Gauge", ListedGauge)
    for key in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(key, raising=False)
    for module in ("utils", "sqlite_storage"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ListedGauge, "values", {})
    if request.param == "mlflow":
        shutil.copy(request.getfixturevalue("mlflow_store"), tmp_path)
    return Run(request.param, tmp_path)


def test_a_steps_number_comes_out_beside_unknown_ones(run):
    run.sink.step(1, {"reward/mean": 0.5, "my/number": 1.0})
    assert run.rewards() == {1: 0.5}


def test_a_number_that_is_not_finite_disturbs_no_other(run):
    run.sink.step(1, {"reward/mean": 0.5, "loss": float("nan"), "bound": float("inf")})
    assert run.rewards() == {1: 0.5}


def test_of_steps_that_a_resumed_run_learns_again_the_later_numbers_count(run):
    for version, reward in ((1, 0.25), (2, 0.5), (3, 0.5)):
        run.sink.step(version, {"reward/mean": reward})
    run.sink.close()
    run.resumed()
    for version in (2, 3):
        run.sink.step(version, {"reward/mean": 0.75})
    rewards = run.rewards()
    assert rewards[3] == 0.75 and rewards.get(2, 0.75) == 0.75


def test_events_of_any_kind_disturb_no_number(run):
    run.sink.event({"kind": "failure", "time": 0.0, "pid": 1, "message": "rollout-0 [died]"})
    run.sink.step(1, {"reward/mean": 0.5})
    run.sink.event({"kind": "something_else", "time": 0.0, "pid": 1})
    assert run.rewards() == {1: 0.5}


def test_the_command_line_where_secrets_may_stand_is_in_no_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["treadwheel", "prompts.token=hush-hush"])
    monkeypatch.setattr("swanlab.sdk.internal.probe_python.environment.runtime._get_command_linux", lambda: None)
    run.sink.step(1, {"reward/mean": 0.5})
    run.rewards()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file.name for file in files if b"hush-hush" in file.read_bytes()] == []


def test_it_closes_without_a_step(run):
    assert run.rewards() == {}

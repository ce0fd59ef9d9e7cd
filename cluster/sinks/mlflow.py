"""MLflow. All drivers of a run log to one MLflow run. Steps are policy versions; if a number is logged twice, the later one counts.

MLFLOW_TRACKING_URI names the server; password or token are MLflow's own variables. Without it, a SQLite store in the run directory is used.
"""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import ConfigError
from cluster.metrics import in_ascii
from cluster.record.run_directory import RunDirectory
from cluster.sinks.tracked import Tracked, finite_only, parameters, tracker

_mlflow = tracker("mlflow")
_ID = "treadwheel.id"
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "preempted": "SCHEDULED"}
"""A preempted run continues later, which MLflow calls SCHEDULED."""
_BATCH = 100
"""Maximum number of parameters that a server takes at once."""


class MLflow(Tracked):
    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._opened()
        now_ms = int(time.time() * 1000)
        entity = _mlflow.entities.Metric
        rows = [entity(_allowed(name), value, now_ms, version) for name, value in finite_only(metrics).items()]
        self._client.log_batch(self._run, metrics=rows)
        if shown := self._trajectories(version):
            self._client.log_dict(self._run, {"trajectories": shown}, f"trajectories/step-{version:06d}.json")

    def event(self, record: Mapping[str, Any]) -> None:
        ending = self._ending.hear(record)
        if self._run is None:
            return
        if "message" in record:
            self._client.set_tag(self._run, f"event.{record['kind']}", str(record["message"])[:500])
        if ending:
            self._client.set_terminated(self._run, _STATUSES[ending])

    def close(self) -> None:
        """The last event has ended the run. Without such an event it stays RUNNING until its next driver ends it."""

    def _check_place(self, directory: RunDirectory) -> None:
        """Without a server, raises ConfigError for a run in an object store, and for a path that MLflow would misread."""
        if "MLFLOW_TRACKING_URI" in os.environ:
            return
        if not directory.is_local:
            raise ConfigError(
                f"run_dir={directory.url!r}: SQLite needs a disk; name a server in MLFLOW_TRACKING_URI, or leave mlflow out"
            )
        if re.search(r"\?|%[0-9a-fA-F]{2}", directory.path()):
            raise ConfigError(
                f"run_dir={directory.url!r}: mlflow reads `?` and `%2F` in a path differently, so its files would lie elsewhere; name "
                "another run_dir, or a server in MLFLOW_TRACKING_URI, or leave mlflow out"
            )

    @property
    def _uri(self) -> str | None:
        """None if a server is named."""
        return None if "MLFLOW_TRACKING_URI" in os.environ else f"sqlite:///{self._directory.path('mlflow.db')}"

    def _opened(self) -> str:
        """Opens the run with this identity: creates it, or sets an ended one to running again."""
        self._client = _mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._project)
        if experiment is None:
            number = self._client.create_experiment(
                self._project, artifact_location=self._uri and self._directory.path("mlflow")
            )
        else:
            number = experiment.experiment_id
        found = self._client.search_runs([number], f"tags.`{_ID}` = '{self._id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        run = found[0] if found else self._client.create_run(number, run_name=self._name, tags={_ID: self._id})
        self._log_parameters(run)
        return run.info.run_id

    def _log_parameters(self, run: Any) -> None:
        """MLflow cannot change a parameter, so a setting that a resumed run changed becomes a tag `resumed.<setting>`."""
        settings = {_allowed(name): str(value) for name, value in parameters(self._directory).items()}
        new = [_mlflow.entities.Param(name, value) for name, value in settings.items() if name not in run.data.params]
        for start in range(0, len(new), _BATCH):
            self._client.log_batch(run.info.run_id, params=new[start : start + _BATCH])
        for name, value in settings.items():
            if run.data.params.get(name, value) != value:
                self._client.set_tag(run.info.run_id, f"resumed.{name}", value)


mlflow = MLflow


def _allowed(name: str) -> str:
    """A name for MLflow: up to 250 letters and digits of any script and `_-./ `, usable as a path: no part is empty, `.` or `..`."""
    cut = re.sub(r"[^\w\-./ ]", lambda found: in_ascii(found[0]), name)[:250] or "_"
    filled = re.sub(r"^/|/(?=/|$)", "_", cut)
    return "/".join("_" * len(part) if part in (".", "..") else part for part in filled.split("/"))

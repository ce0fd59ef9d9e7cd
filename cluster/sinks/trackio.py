"""Trackio. All drivers of a run log to one Trackio run, with a few trajectories of each step as traces, and warnings as alerts.

Its files lie in TRACKIO_DIR, where `trackio show` finds them. TRACKIO_SPACE_ID sends them to a Space, with HF_TOKEN. A new Space is private
unless `private` is false.
"""

from collections.abc import Mapping
from typing import Any

from cluster.record.run_directory import RunDirectory
from cluster.sinks.tracked import Tracked, finite_only, parameters, tracker

_package = tracker("trackio")


class Trackio(Tracked):
    def __init__(
        self,
        *,
        directory: RunDirectory,
        num_steps: int,
        project: str | None = None,
        name: str | None = None,
        num_trajectories: int = 4,
        private: bool = True,
    ) -> None:
        super().__init__(
            directory=directory, num_steps=num_steps, project=project, name=name, num_trajectories=num_trajectories
        )
        self._is_private = private

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._opened()
        shown = {f"trajectories/{number}": _trace(each) for number, each in enumerate(self._trajectories(version))}
        self._run.log({**finite_only(metrics), "policy_version": version, **shown}, step=version)

    def event(self, record: Mapping[str, Any]) -> None:
        ending = self._ending.hear(record)
        if self._run is None:
            return
        if ending:
            level = _package.AlertLevel.ERROR if ending == "failed" else _package.AlertLevel.INFO
            self._run.alert(title=f"run {ending}", text=self._ending.reason, level=level)
        elif "message" in record:
            self._run.alert(title=record["kind"], text=str(record["message"]), level=_package.AlertLevel.WARN)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _opened(self) -> Any:
        return _package.init(
            project=self._project,
            name=f"{self._name}-{self._id}",  # Trackio finds a run to resume only by its name
            resume="allow",
            config=parameters(self._directory),
            private=self._is_private,  # Trackio's own default is public
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


def _trace(trajectory: Mapping[str, Any]) -> Any:
    messages = [
        {"role": "user", "content": trajectory["prompt_text"]},
        {"role": "assistant", "content": trajectory["completion_text"]},
    ]
    facts = {name: value for name, value in trajectory.items() if not name.endswith("_text")}
    return _package.Trace(messages=messages, metadata=facts)


trackio = Trackio

"""Weights & Biases. All drivers of a run log to one W&B run. The x-axis is `policy_version`, since a resumed run logs some steps again.

WANDB_PROJECT names the project unless the run file does. The key comes from WANDB_API_KEY. Without it and without WANDB_MODE, the run is
kept offline in the run directory.
"""

import os
from collections.abc import Mapping
from typing import Any

from cluster.sinks.tracked import Tracked, finite_only, parameters, tracker, without_terminal

_package = tracker("wandb")
_STEP = "policy_version"
_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 143, "preempted": 143}


class Wandb(Tracked):
    in_store = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR")
    project_from = "WANDB_PROJECT"

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._opened()
        row: dict[str, Any] = {**finite_only(metrics), _STEP: version}
        if shown := self._trajectories(version):
            row["trajectories"] = _package.Table(
                columns=list(shown[0]), data=[list(each.values()) for each in shown], allow_mixed_types=True
            )
        self._run.log(row)

    def event(self, record: Mapping[str, Any]) -> None:
        if self._ending.hear(record) == "preempted" and self._run is not None:
            self._run.mark_preempting()

    def close(self) -> None:
        if self._run is None:
            return
        ending = self._ending.kind
        if ending:
            self._run.summary["status"] = ending
        self._run.finish(exit_code=_EXIT_CODES[ending or "stopped"])

    @without_terminal()
    def _opened(self) -> Any:
        has_key = "WANDB_API_KEY" in os.environ
        run = _package.init(
            project=self._project,
            id=self._id,
            name=self._name,
            resume="allow",
            dir=self._directory.path() if self._directory.is_local else None,
            mode=None if has_key or "WANDB_MODE" in os.environ else "offline",
            config=parameters(self._directory),
            # The machine's facts are not sent: they include the command line, which may contain secrets.
            settings=_package.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True),
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        return run


wandb = Wandb

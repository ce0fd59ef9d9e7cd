"""SwanLab. All drivers of a run log to one SwanLab run. Steps are policy versions.

The key comes from SWANLAB_API_KEY. Without it and without SWANLAB_MODE, the run is kept offline in the run directory.
"""

import os
from collections.abc import Mapping
from typing import Any

from cluster.sinks.tracked import Tracked, finite_only, parameters, tracker, without_terminal

_package = tracker("swanlab")
_STATES = {"finished": "success", "failed": "crashed"}
"""Every other end is `aborted`, with the reason."""


class SwanLab(Tracked):
    in_store = ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_LOGDIR")

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._opened()
        row: dict[str, Any] = {**finite_only(metrics), "policy_version": version}
        if shown := self._trajectories(version):
            row["trajectories"] = [
                _package.Text(
                    f"{each['prompt_text']}\n---\n{each['completion_text']}", caption=f"reward {each['reward']}"
                )
                for each in shown
            ]
        self._run.log(row, step=version)

    def event(self, record: Mapping[str, Any]) -> None:
        self._ending.hear(record)

    def close(self) -> None:
        if self._run is None:
            return
        kind, reason = self._ending.kind or "the driver ended", self._ending.reason
        state = _STATES.get(kind, "aborted")
        error = None if state == "success" else f"{kind}: {reason}" if reason else kind
        self._run.finish(state=state, error=error)

    @without_terminal()
    def _opened(self) -> Any:
        has_key = "SWANLAB_API_KEY" in os.environ
        return _package.init(
            project=self._project,
            id=self._id,
            name=self._name,
            resume="allow",
            log_dir=self._directory.path("swanlab") if self._directory.is_local else None,
            mode=None if has_key or "SWANLAB_MODE" in os.environ else "offline",
            config=parameters(self._directory),
            # Neither the terminal's output nor the command line is sent: both may contain secrets.
            settings=_package.Settings(
                terminal={"proxy_type": "none"}, probe={"git": False, "requirements": False, "runtime": False}
            ),
        )


swanlab = SwanLab

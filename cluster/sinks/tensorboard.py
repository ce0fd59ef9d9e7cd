"""tensorboard/: the same metrics as in metrics.jsonl. For a run in an object store, the file is written locally and uploaded every
minute."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes them at run time
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from cluster.contracts.errors import StorageError
from cluster.contracts.importing import hidden
from cluster.record.run_directory import TENSORBOARD, RunDirectory
from cluster.sinks.jsonl import read_steps

with hidden("botocore"):  # TensorBoard would import it, with boto3, for files in S3, of which it gets none
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_UPLOAD_EVERY_S = 60.0


class TensorBoard:
    """One event file for each driver. A resumed run's file begins with its first step; TensorBoard drops this and later steps of earlier
    files."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._here = None if directory.is_local else tempfile.TemporaryDirectory(prefix="treadwheel-tensorboard-")
        self._uploaded_s = time.monotonic()
        self._writer = EventFileWriter(self._here.name if self._here else directory.path(TENSORBOARD))
        self._before: dict[int, dict[str, float]] | None = None

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        if self._before is None:
            self._before = self._begun(version)
        self._draw(version, {**self._before.pop(version, {}), **metrics}, at=time.time())
        if time.monotonic() - self._uploaded_s >= _UPLOAD_EVERY_S:
            self._uploaded_s = time.monotonic()
            self._writer.flush()
            with contextlib.suppress(StorageError):  # the next upload contains everything
                self._upload()

    def _begun(self, version: int) -> dict[int, dict[str, float]]:
        """Begins the file. Returns the numbers that TensorBoard drops and a step that is learned again lacks: evaluation, timing.

        In an object store, the last steps before are drawn again, since a killed driver may not have uploaded them."""
        steps = read_steps(self._directory)
        earlier = sorted(each for each in steps if each < version) if self._here else []
        since = max((steps[each].get("time", 0.0) for each in earlier), default=0.0) - 2 * _UPLOAD_EVERY_S
        unsure = [each for each in earlier if steps[each].get("time", 0.0) > since]
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=min([*unsure, version]), session_log=start, wall_time=time.time()))
        for each in unsure:
            self._draw(each, steps[each], at=steps[each].get("time", 0.0))
        return {each: numbers for each, numbers in steps.items() if each >= version}

    def _draw(self, version: int, numbers: Mapping[str, float], *, at: float) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items() if name != "time"]
        self._writer.add_event(Event(step=version, summary=Summary(value=values), wall_time=at))

    def event(self, record: Mapping[str, Any]) -> None:
        """TensorBoard shows only numbers."""

    def close(self) -> None:
        self._writer.close()
        self._upload()
        if self._here:
            self._here.cleanup()

    def _upload(self) -> None:
        if not self._here:
            return
        for name in os.listdir(self._here.name):
            self._directory.upload(f"{TENSORBOARD}/{name}", os.path.join(self._here.name, name))


def tensorboard(*, directory: RunDirectory, num_steps: int) -> TensorBoard:
    return TensorBoard(directory)

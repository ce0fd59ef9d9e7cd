"""tensorboard/: the same names as in metrics.jsonl. A run directory in an object store has none (event files are appended to)."""

import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes it at run time
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cluster.record.run_directory import RunDirectory


class TensorBoard:
    def __init__(self, folder: str) -> None:
        self._writer = EventFileWriter(folder)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=version, summary=Summary(value=values), wall_time=time.time()))

    def event(self, record: Mapping[str, Any]) -> None:
        """TensorBoard shows numbers."""

    def close(self) -> None:
        self._writer.close()


class Nothing:
    """Stands in where event files cannot be appended to."""

    def step(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def tensorboard(*, directory: RunDirectory, num_steps: int) -> TensorBoard | Nothing:
    return TensorBoard(directory.path("tensorboard")) if directory.is_local else Nothing()

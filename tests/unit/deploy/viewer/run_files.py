"""Run directories as a driver leaves them, made of lines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from cluster.contracts.schema import SCHEMA, to_batch
from cluster.record.run_directory import RunDirectory

CONFIG = {
    "num_steps": 10,
    "model": {"path": "a-model"},
    "buffer": {"max_off_policy_steps": 2},
    "mismatch": {"alarm_nats": 0.5},
}


def step(version: int, **numbers: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in numbers.items()}
    return {"policy_version": version, "time": 1000.0 + version, **named}


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, "pid": 1, "policy_version": 0, **fields}


def release_when_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's driver ends as soon as lines of it have been read."""
    read = RunDirectory.read_json_lines

    def ending(itself: RunDirectory, name: str) -> list[dict[str, Any]]:
        lines = read(itself, name)
        run.release()
        return lines

    monkeypatch.setattr(RunDirectory, "read_json_lines", ending)


def write_run(
    folder: Path, *, steps: Sequence[Mapping[str, Any]] = (), events: Sequence[Mapping[str, Any]] = (), **files: Any
) -> Path:
    """`files` are JSON files by their name without the end."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    append(folder / "metrics.jsonl", steps)
    append(folder / "events.jsonl", [event("launched", 1000.0), *events])
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with file.open("a") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


def write_trajectories(folder: Path, step: int, *groups: Sequence[Mapping[str, Any]]) -> Path:
    """The file of a step, as the recorder writes it: a batch a group, of rows such as `tests.unit.cluster.contracts.rows.row` makes."""
    file = folder / f"trajectories/step-{step:06d}.arrow"
    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(str(file), SCHEMA) as writer:
        for group in groups:
            writer.write_batch(to_batch([dict(each) for each in group]))
    return file

"""`treadwheel export`: recorded trajectories as Parquet tables, examples for fine-tuning, or pairs for preference training.

Examples and pairs are JSON lines as TRL and most trainers read them: messages where the prompt was messages, texts where it was a text.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.schema import SCHEMA
from cluster.contracts.segments import episodes
from cluster.contracts.types import FinishReason, RewardStatus
from cluster.record.ledger import Ledger, Record
from cluster.record.local_files import sync_files, sync_folder
from cluster.record.recorder import Recorder, num_pruned_steps
from cluster.record.run_directory import RUN_YAML, RunDirectory
from deploy.step_range import step_range

Line = dict[str, Any]
STEP = pa.field("step", pa.int64())
_FIELDS = ("completion_text", "episode", "finish_reason", "info", "messages", "prompt_text", "reward", "reward_status",
           "segment_index")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which of a run's trajectories are exported."""

    steps: str | None = None
    """`12` or `10-20`; None: all steps."""
    best: int = 1
    """Completions of each group, those with the highest rewards; among equal rewards the first."""
    min_reward: float | None = None
    """Completions with a lower reward are left out."""


def export(run_dir: RunDirectory, out: str, *, format: str, chosen: Chosen) -> int:
    """Writes `out`, a folder for `parquet` and else a file, and returns its number of rows or lines.

    `out` appears once it is complete. Raises ConfigError for steps that are not recorded, for an `out` that exists, and if nothing is
    chosen; LedgerError for a file that differs from the record.
    """
    if "://" in out:
        raise ConfigError(
            f"{out!r} is in an object store, and an export is a local file or folder; name one, and copy it there"
        )
    if os.path.lexists(out):
        raise ConfigError(f"{out!r} exists; name another file or folder")
    run_dir.reach()
    records = _records(run_dir, chosen.steps)
    try:
        with _aside(out) as aside:
            if format == "parquet":
                return _write_parquet(run_dir, records, aside)
            lines = _LINES[format]
            return _write_lines(aside, (line for group in _groups(run_dir, records) for line in lines(group, chosen)))
    except OSError as error:
        raise StorageError(f"{out!r} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _aside(out: str) -> Iterator[str]:
    """A temporary path to write to, renamed to `out` at the end and removed after an error. `out` is complete after a power cut too."""
    folder, name = os.path.split(os.path.abspath(out))
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as temporary:
        aside = os.path.join(temporary, name)
        yield aside
        sync_files(aside)
        os.rename(aside, out)
    sync_folder(folder)


def _records(run_dir: RunDirectory, steps: str | None) -> list[Record]:
    found = kept = kept_records(run_dir)
    if steps is not None:
        first, last = step_range(steps)
        found = [each for each in kept if first <= each.step <= last]
    if not kept and not run_dir.exists(RUN_YAML):
        raise ConfigError(f"{run_dir.url!r} holds no run (no {RUN_YAML}); name the run_dir of a run")
    if not found:
        asked_for = "" if steps is None else f"--steps={steps!r}: "
        raise ConfigError(f"{asked_for}{run_dir.url!r} has trajectories of {in_words(kept)}")
    return found


def kept_records(run_dir: RunDirectory) -> list[Record]:
    """Records of the steps whose trajectories are still there, in order."""
    num_pruned = num_pruned_steps(run_dir)
    return [record for record in Ledger(run_dir).records() if record.step > num_pruned]


def in_words(records: Sequence[Record]) -> str:
    return f"steps {records[0].step} to {records[-1].step}" if records else "no step"


def step_table(run_dir: RunDirectory, record: Record) -> pa.Table:
    """A step's trajectories in the schema, with the column `step` first. Raises LedgerError for a file that differs from the record."""
    batches = Recorder(run_dir).read(record.trajectories, record.trajectories_digest)
    # `cast`: nullability of an older file's columns may differ.
    table = pa.Table.from_batches(batches).cast(SCHEMA)
    return table.add_column(0, STEP, pa.array([record.step] * len(table), type=STEP.type))


def _groups(run_dir: RunDirectory, records: Sequence[Record]) -> Iterator[pa.RecordBatch]:
    recorder = Recorder(run_dir)
    for record in records:
        yield from recorder.read(record.trajectories, record.trajectories_digest)


def _without_maps(schema: pa.Schema) -> pa.Schema:
    """Maps become lists of `key` and `value`, since `datasets` refuses maps."""
    fields = [each.with_type(_entries(each.type)) if pa.types.is_map(each.type) else each for each in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _entries(of_map: pa.MapType) -> pa.ListType:
    key = pa.field("key", of_map.key_type, nullable=False)
    return pa.list_(pa.struct([key, pa.field("value", of_map.item_type)]))


def _write_parquet(run_dir: RunDirectory, records: Sequence[Record], out: str) -> int:
    """One file per step, in a folder that `datasets.load_dataset` and DuckDB read as one table."""
    os.makedirs(out)
    num_rows = 0
    for record in records:
        table = step_table(run_dir, record)
        table = table.cast(_without_maps(table.schema))
        pa.parquet.write_table(table, os.path.join(out, f"step-{record.step:06d}.parquet"), compression="zstd")
        num_rows += len(table)
    return num_rows


def _write_lines(out: str, lines: Iterator[Line]) -> int:
    """Raises ConfigError if there are no lines."""
    number = 0
    with open(out, "x", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            number += 1
    if number == 0:
        raise ConfigError(
            "nothing is chosen: lower --min-reward, or name more steps; failed and truncated completions are left out"
        )
    return number


def _rated(group: pa.RecordBatch, chosen: Chosen) -> list[tuple[float, list[Line]]]:
    """Reward and segments of each episode that ended by itself and whose reward is known, the best reward first."""
    rows = group.select(list(_FIELDS)).to_pylist()
    found: list[tuple[float, list[Line]]] = []
    for places in episodes(group):
        of_episode = [rows[place] for place in places]
        last = of_episode[-1]
        if last["reward_status"] != RewardStatus.OK or last["finish_reason"] != FinishReason.STOP:
            continue
        if chosen.min_reward is None or last["reward"] >= chosen.min_reward:
            found.append((last["reward"], of_episode))
    return sorted(found, key=lambda each: -each[0])


def _examples(group: pa.RecordBatch, chosen: Chosen) -> Iterator[Line]:
    """One conversation per segment of an episode, as the model saw it."""
    for reward, segments in _rated(group, chosen)[: chosen.best]:
        for row in segments:
            prompt, reply = _said(row)
            if isinstance(prompt, str):
                yield {"prompt": prompt, "completion": reply, "reward": reward}
            else:
                yield {"messages": [*prompt, *reply], **_tools(row), "reward": reward}


def _pairs(group: pa.RecordBatch, chosen: Chosen) -> Iterator[Line]:
    """The best completion of a group and the worst with the same prompt and tools, if their rewards differ. Prompts may differ within a
    group, since an agent may write one for each episode. Episodes of several segments are left out: they have no single answer."""
    single = [(reward, segments[0]) for reward, segments in _rated(group, chosen) if len(segments) == 1]
    rated = [(reward, *_said(row), _tools(row)) for reward, row in single]
    comparable = [each for each in rated if (each[1], each[3]) == (rated[0][1], rated[0][3])]
    if not comparable or comparable[0][0] == comparable[-1][0]:
        return
    (better, prompt, best, tools), (worse, _, worst, _) = comparable[0], comparable[-1]
    rewards = {"reward_chosen": better, "reward_rejected": worse}
    yield {"prompt": prompt, "chosen": best, "rejected": worst, **tools, **rewards}


def _said(row: Line) -> tuple[Any, Any]:
    """(prompt, reply), both as texts or both as messages."""
    if row["messages"] is not None:
        messages = json.loads(row["messages"])
        first = _first_reply(row, messages)
        return messages[:first], messages[first:]
    messages = json.loads(row["info"]).get("messages")
    is_text = messages == [{"role": "user", "content": row["prompt_text"]}]  # no chat template wrote it
    if messages is None or is_text:
        return row["prompt_text"], row["completion_text"]
    return messages, [{"role": "assistant", "content": row["completion_text"]}]


def _tools(row: Line) -> Line:
    """The column `tools`, the schemas that the prompt shows. Empty without tools, and for a record that does not name them."""
    of_segments = json.loads(row["episode"] or "{}").get("tools") or [[]]
    shown = of_segments[row["segment_index"]] if len(of_segments) > 1 else of_segments[0]
    return {"tools": shown} if shown else {}


def _first_reply(row: Line, messages: Sequence[Line]) -> int:
    """Index of the model's first message. A record without `replies` does not name the model's messages: all of the assistant's count."""
    recorded = json.loads(row["episode"] or "{}").get("replies")
    said_by_assistant = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    replies = said_by_assistant if recorded is None else recorded[row["segment_index"]]
    return replies[0] if replies else len(messages)


_LINES: dict[str, Callable[[pa.RecordBatch, Chosen], Iterator[Line]]] = {"sft": _examples, "dpo": _pairs}
FORMATS = ("parquet", *_LINES)

"""One recorded step of a run, read from its file of trajectories: groups, results of trajectories, texts, and tokens.

A local file is memory-mapped, so that only the needed parts are read. An object store gives whole files; the last two are kept.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException

from cluster.contracts.errors import DataError, StorageError
from cluster.contracts.hiding import hidden
from cluster.contracts.learned import Learned
from cluster.contracts.row_checks import check_contents
from cluster.contracts.schema import SCHEMA, counted_versions, upgraded
from cluster.contracts.segments import SEGMENT, whole
from cluster.record.recorder import learned_name, learned_of, num_pruned_steps, step_of
from cluster.record.run_directory import TRAJECTORIES, RunDirectory
from deploy.viewer.chain import names_its_file
from deploy.viewer.episodes import EpisodeFacts, facts_of, last_words
from deploy.viewer.runs import Run

_TOLD = ("sample_index", "reward", "reward_status", "reward_message", "reward_components", "finish_reason", "worker",
         "started_at", "finished_at", "environment", "turns", "episode", "failed_stage", "loss_mask", "policy_versions")  # fmt: skip
_MOST_BYTES = 64_000_000
"""Most bytes that one answer reads from an object store."""
_SEGMENT = ("sample_index", "segment_index", "prompt_text", "prompt_token_ids", "completion_token_ids", "turns", "messages",
            "token_rewards", "episode")  # fmt: skip
_TOKENS = ("loss_mask", "policy_versions", "rollout_logprobs", "reference_logprobs", "token_rewards")
_LARGEST_WHOLE = 2**53 - 1
"""Of browsers: a larger one may lose its last digits."""
_DAMAGED = (pa.ArrowException, OSError, LookupError, ValueError)
"""Arrow's errors for a damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Results of one trajectory, without text and tokens."""

    sample_index: int
    reward: float | None
    """None: not judged, or a judge failed; `reward_status` and `reward_message` say which."""
    reward_status: str | None
    reward_message: str | None
    components: Mapping[str, float | None]
    finish_reason: str
    worker: str
    num_tokens: int
    """Tokens of the completion."""
    num_trained: int
    """Tokens that the policy wrote: the loss mask is true."""
    oldest_version: int | None
    """Oldest policy version among the trained tokens, or among all tokens if none is trained. None, like the next two fields, if the
    trajectory failed before its first token."""
    newest_version: int | None
    staleness: int | None
    """Version of the learning policy minus `oldest_version`."""
    episode: EpisodeFacts | None
    """None for a single turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one prompt, in sample order."""

    ticket_index: int
    """Its place in the run's start order, by which URLs name it."""
    group_id: str
    prompt_id: str
    seconds: float
    """From the start of its first trajectory to the end of its last one."""
    trajectories: tuple[Trajectory, ...]


class RecordedStep:
    """The file of one step. Methods raise HTTPException 404 with a sentence for a group or trajectory that is not in it, and DataError with
    the file's name if it is damaged."""

    def __init__(self, run: Run, step: int, name: str) -> None:
        """Opens the file and reads its index."""
        self.step = step
        """The policy version that the step made. The step learned with the version before."""
        self._directory, self._name = run.directory, name
        self.path = run.directory.path(name)
        try:
            self._reader = pa.ipc.open_file(_content(run.directory, name))
            self._refuse_another_schema()
            self._batches = {
                self._read(place, ("ticket_index",))["ticket_index"][0].as_py(): place
                for place in range(self._reader.num_record_batches)
            }
        except _DAMAGED as error:
            raise DataError(f"{self.path} is damaged: {error}") from error

    @property
    def tickets(self) -> list[int]:
        """Tickets of the groups, in the learner's order."""
        return list(self._batches)

    def groups(self) -> list[Group]:
        """Groups in the learner's order. Reads no text and no token ids."""
        return [self.group(ticket) for ticket in self._batches]

    def group(self, ticket: int) -> Group:
        batch = self.columns(ticket, "group_id", "prompt_id", *_TOLD)
        rows = batch.select([name for name in _TOLD if name not in ("loss_mask", "policy_versions")]).to_pylist()
        self._refuse_ragged(batch)
        return Group(
            ticket_index=ticket,
            group_id=batch["group_id"][0].as_py(),
            prompt_id=batch["prompt_id"][0].as_py(),
            seconds=(max(row["finished_at"] for row in rows) - min(row["started_at"] for row in rows)).total_seconds(),
            trajectories=tuple(
                self._trajectory(row, versions.values, mask.values)
                for row, versions, mask in zip(rows, batch["policy_versions"], batch["loss_mask"], strict=True)
            ),
        )

    def _trajectory(self, row: Mapping[str, Any], versions: pa.Array, mask: pa.Array) -> Trajectory:
        is_trained = mask.to_numpy(zero_copy_only=False)
        counted = counted_versions(versions.to_numpy(), is_trained)
        oldest, newest = (int(counted.min()), int(counted.max())) if len(counted) else (None, None)
        return Trajectory(
            sample_index=row["sample_index"],
            reward=row["reward"],
            reward_status=row["reward_status"],
            # An error of a judge may quote the URL or header of its request.
            reward_message=hidden(row["reward_message"]),
            components=dict(row["reward_components"]),
            finish_reason=row["finish_reason"],
            worker=row["worker"],
            num_tokens=len(versions),
            num_trained=int(is_trained.sum()),
            oldest_version=oldest,
            newest_version=newest,
            staleness=None if oldest is None else self.step - 1 - oldest,
            episode=facts_of(row),
        )

    def prompt(self, ticket: int) -> tuple[str, Mapping[str, Any]]:
        """(the prompt's text as the policy saw it, its columns). The columns include `messages` if the prompt was a conversation."""
        batch = self.columns(ticket, "prompt_text", "info")
        try:
            return batch["prompt_text"][0].as_py(), _columns(batch["info"][0].as_py())
        except ValueError as error:
            raise DataError(f"{self.path} is damaged: {error}") from error

    def completions(self, ticket: int) -> dict[int, str]:
        """Texts of a group's completions by sample, without special tokens; for an episode, the model's last message."""
        batch = self.columns(ticket, "sample_index", "completion_text", "messages", "episode")
        texts: dict[int, str] = {}
        for row in batch.to_pylist():
            last = last_words(row)
            texts[row["sample_index"]] = row["completion_text"] if last is None else last
        return texts

    def columns(self, ticket: int, *names: str) -> pa.RecordBatch:
        """These columns of a group, one row per trajectory: the segments of an episode are joined to one completion."""
        return self._read(self._place(ticket), names)

    def tokens(self, ticket: int, sample: int) -> dict[str, list[Any] | None]:
        """`prompt_token_ids`, and columns with one value per token of the completion: `completion_token_ids`, `loss_mask`,
        `policy_versions`, `rollout_logprobs`, `reference_logprobs`, `token_rewards`. None: the column was not recorded."""
        batch = self.columns(ticket, "sample_index", "prompt_token_ids", "completion_token_ids", *_TOKENS)
        samples = batch["sample_index"].to_pylist()
        if sample not in samples:
            raise HTTPException(404, f"group {ticket} of step {self.step} has no trajectory {sample}")
        row = samples.index(sample)
        return {name: batch[name][row].as_py() for name in batch.schema.names if name != "sample_index"}

    def segments(self, ticket: int, sample: int) -> list[dict[str, Any]]:
        """Rows of one trajectory in order, one per segment, with the columns of its conversation."""
        batch = self._rows(self._place(ticket), _SEGMENT)
        try:
            check_contents(batch, ["turns"])
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error
        return batch.filter(pc.equal(batch["sample_index"], sample)).to_pylist()

    def learned(self) -> Learned | None:
        """The record of learning of this step; None if it was not recorded, or not yet."""
        try:
            return learned_of(self._directory, self._name)
        except DataError as error:
            raise DataError(f"{self._directory.path(learned_name(self._name))}: {error}") from error

    def _refuse_another_schema(self) -> None:
        if self._reader.num_record_batches == 0:
            return
        missing = set(SCHEMA.names) - set(upgraded(self._reader.get_batch(0)).schema.names)
        if missing:
            raise DataError(
                f"{self.path} was written by another version of treadwheel: it has no {', '.join(sorted(missing))}"
            )

    def _refuse_ragged(self, batch: pa.RecordBatch) -> None:
        lengths, others = (pc.list_value_length(batch[name]) for name in ("policy_versions", "loss_mask"))
        is_empty = pc.and_(pc.equal(lengths, 0), pc.is_valid(batch["reward"]))
        if lengths != others or pc.any(is_empty).as_py():
            raise DataError(
                f"{self.path} is damaged: a completion with a reward is empty, or its columns have different lengths"
            )

    def _place(self, ticket: int) -> int:
        if ticket not in self._batches:
            raise HTTPException(404, f"step {self.step} has no group {ticket}")
        return self._batches[ticket]

    def _read(self, place: int, names: Sequence[str]) -> pa.RecordBatch:
        try:
            return whole(self._rows(place, names)).select(list(names))
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error

    def _rows(self, place: int, names: Sequence[str]) -> pa.RecordBatch:
        """One row per segment, with these columns and those that `whole` and `check_contents` need."""
        of_turns = ("completion_token_ids", "finish_reason") if "turns" in names else ()
        needed = dict.fromkeys([*names, "group_id", "sample_index", *of_turns, *SEGMENT])
        try:
            batch = upgraded(self._reader.get_batch(place)).select(list(needed))
            batch.validate(full=True)
        except _DAMAGED as error:
            raise DataError(f"{self.path} is damaged: {error}") from error
        return batch


def open_step(run: Run, step: int) -> RecordedStep:
    """The step that made policy version `step`. Raises HTTPException 404 with a sentence if its trajectories are not there."""
    # In an object store a step may have several files: all but one are from drivers that were taken for dead.
    record = run.chain().record(step)
    if record and names_its_file(record) and run.directory.exists(record.trajectories):
        return RecordedStep(run, step, record.trajectories)
    is_unknown = record is None or run.directory.is_local
    names = [name for name in run.directory.names(TRAJECTORIES) if step_of(name) == step and is_unknown]
    if not names:
        raise HTTPException(404, _why_missing(run, step))
    return RecordedStep(run, step, f"{TRAJECTORIES}/{names[0]}")


def recorded_steps(run: Run) -> list[int]:
    """Steps whose trajectories are there, in order."""
    return sorted({step for name in run.directory.names(TRAJECTORIES) if (step := step_of(name)) is not None})


def num_readable(run: Run, step: int, *, most: int) -> int:
    """Number of steps that one answer may read, if their files are as large as this step's. On a disk, where only the needed parts are
    read: `most`. In an object store: as many as fit into `_MOST_BYTES`, at least one."""
    record = run.chain().record(step)
    if run.directory.is_local or record is None:
        return most
    size = run.directory.size_bytes(record.trajectories) or 1
    return max(1, min(most, _MOST_BYTES // size))


def asked(text: str, columns: Mapping[str, Any]) -> str:
    """The question of a prompt: the user's last message in a conversation, without the template's marks, or else the text."""
    messages = columns.get("messages")
    found = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    contents = [each.get("content") for each in found if each.get("role") == "user"]
    return next((content for content in reversed(contents) if isinstance(content, str)), text)


def neighbours(numbers: list[int], number: int) -> tuple[int | None, int | None]:
    """The numbers before and after `number` in `numbers`; None if there is none."""
    place = numbers.index(number)
    return (numbers[place - 1] if place else None), (numbers[place + 1] if place + 1 < len(numbers) else None)


def _why_missing(run: Run, step: int) -> str:
    if 0 < step <= (pruned := num_pruned_steps(run.directory)):
        return f"the trajectories of steps up to {pruned} were removed (record.keep_trajectories)"
    if not (steps := recorded_steps(run)):
        return f"step {step} is not recorded: this run has no trajectories yet"
    return f"step {step} is not recorded: there are trajectories of steps {steps[0]} to {steps[-1]}"


def _content(directory: RunDirectory, name: str) -> "pa.NativeFile | pa.Buffer":
    if not directory.is_local:
        return _stored(directory, name)
    try:
        return pa.memory_map(directory.path(name))
    except OSError as error:
        raise StorageError(f"{directory.path(name)} cannot be read: {error}") from error


@functools.lru_cache(maxsize=2)
def _stored(directory: RunDirectory, name: str) -> pa.Buffer:
    """Cached: in an object store a file's name contains the digest of its content, which never changes."""
    return directory.read_file(name)


def _columns(info: str) -> dict[str, Any]:
    """A prompt's columns. Numbers that are not finite, such as NaN, and whole ones beyond 2^53 become text, since browsers read neither."""

    def parsed(number: str) -> float | str:
        return value if math.isfinite(value := float(number)) else number

    def whole_number(number: str) -> int | str:
        return int(number) if abs(float(number)) <= _LARGEST_WHOLE else number

    return json.loads(info, parse_constant=str, parse_float=parsed, parse_int=whole_number)

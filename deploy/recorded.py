"""Groups for `treadwheel learn`: read from Arrow files, or imported from rows of prompts and completions."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cluster.contracts.config import ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError, DataError, StorageError, headline
from cluster.contracts.plugins import Plugin, prompt_source
from cluster.contracts.schema import SCHEMA, summarize, to_batch, validate, with_columns
from cluster.contracts.segments import episodes
from cluster.contracts.types import FinishReason, GroupSummary, Prompt, RewardStatus
from cluster.record.ledger import Ledger
from cluster.record.recorder import step_of
from cluster.record.run_directory import RUN_YAML, TRAJECTORIES, RunDirectory
from cluster.record.storage import Storage
from cluster.rollouts.tickets import epoch_order
from deploy.formatters import load_formatter

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from learner.algorithms.objective import Objective


class RecordedGroups:
    """Groups by index, like tickets. Every epoch is a permutation of the data, seeded by run seed and epoch."""

    def __init__(self, groups: Sequence[pa.RecordBatch], *, seed: int, digest: str, smallest: int) -> None:
        self._groups = groups
        self.smallest = smallest
        """Number of known rewards in the group with the fewest."""
        self.digest = digest
        """SHA-256 of the files' bytes."""
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(len(groups), seed=seed, epoch=epoch))

    @classmethod
    def open(
        cls, place: str, *, seed: int, max_failed_share: float, dropped_by: Callable[[GroupSummary], str | None]
    ) -> "RecordedGroups":
        """`place` is a run directory, a folder of .arrow files, or one file. Trajectories with one `group_id` in one file are a group.

        As in `train`, aborted trajectories are left out, groups with too few known rewards, and groups for which `dropped_by` names a
        filter. Raises ConfigError if no group is left, or if only some trajectories have log-probs of the policy that sampled them;
        DataError that names file, row and field if a file breaks the schema.
        """
        digest = hashlib.sha256()
        whole = filter(len, map(_finished, _read(place, seen=digest.update)))
        found = [(group, summarize(group)) for group in whole]
        trains = lambda summary: summary.can_train(max_failed_share=max_failed_share) and not dropped_by(summary)
        kept = [(group, summary) for group, summary in found if trains(summary)]
        if not kept:
            raise ConfigError(
                f"recorded={place!r} has {len(found)} groups, and none to learn from: name a run directory, a folder of .arrow files "
                "or one file, with rewards that the algorithm's filters keep"
            )
        groups = [group for group, _ in kept]
        _refuse_mixed_samplers(groups, place=place)
        smallest = min(len(summary.known_rewards) for _, summary in kept)
        return cls(groups, seed=seed, digest=digest.hexdigest(), smallest=smallest)

    @classmethod
    def of_run(cls, config: RunConfig, objective: "Objective") -> "RecordedGroups":
        """The groups of `config.recorded`. Raises as `open`, and ConfigError for data from which this run cannot learn."""
        place = config.recorded
        assert place is not None, "callers set `recorded`"
        if RunDirectory(place).path() == RunDirectory(config.run_dir).path():
            raise ConfigError(
                f"recorded={place!r} is also the run_dir; name another run_dir for the run that learns from it"
            )
        data = cls.open(
            place, seed=config.seed, max_failed_share=config.buffer.max_failed_share, dropped_by=objective.dropped_by
        )
        try:
            objective.check_recorded(smallest_group=data.smallest, is_sampler_known=data.is_sampler_known)
            data.refuse_another_tokenizer(load_formatter(config.model))
        except ConfigError as error:
            raise ConfigError(f"recorded={place!r}: {error}") from error
        return data

    def __len__(self) -> int:
        return len(self._groups)

    def refuse_another_tokenizer(self, formatter: "ChatFormatter") -> None:
        """Raises ConfigError if the tokens of the first group do not decode to its texts: token ids would have other meanings."""
        first = self._groups[0]
        for tokens, text in zip(
            first["completion_token_ids"].to_pylist(), first["completion_text"].to_pylist(), strict=True
        ):
            if (decoded := formatter.decode(tokens)) != text:
                raise ConfigError(
                    f"the completion {text[:40]!r} has tokens that the tokenizer of model.path decodes to {decoded[:40]!r}; "
                    "learn with the model that made these trajectories, or with another model of the same tokenizer"
                )

    @property
    def is_sampler_known(self) -> bool:
        """Whether the trajectories have log-probs of the policy that sampled them."""
        return any(group["rollout_logprobs"].null_count < group.num_rows for group in self._groups)

    def group(self, index: int) -> pa.RecordBatch:
        """The group that the run consumes at place `index`, with ids made from `index`.

        Its tokens count as sampled by version 0, the oldest, since no version of this run sampled them. Log-probs of a reference are
        removed: that was another run's reference.
        """
        epoch, place = divmod(index, len(self._groups))
        group = self._groups[self._order(epoch)[place]]
        num_rows = group.num_rows
        return with_columns(
            group,
            group_id=[f"{index:08d}"] * num_rows,
            ticket_index=[index] * num_rows,
            sample_index=[sample for sample, rows in enumerate(episodes(group)) for _ in rows],
            policy_versions=[[0] * len(tokens) for tokens in group["completion_token_ids"]],
            **{name: [None] * num_rows for name in SCHEMA.names if name.startswith("reference_")},
        )


def import_rows(path: str, out: str, *, model: ModelConfig, prompts: Plugin) -> tuple[int, int]:
    """Writes the rows of a prompt file with the columns `completion` and `reward` as trajectories; returns (groups, trajectories).

    Rows with the same `group` are a group; without that column, rows with the same prompt. The first row's prompt_id is the group's. The
    policy that wrote the completions is unknown: `rollout_logprobs` is null. If the run's prompts come from a file, this file is read with
    the same parameters (`prompts.column`, `text_as`, `system_prompt`). Raises ConfigError as `prompt_source`, and for an `out` that exists
    or does not end with .arrow; DataError that names file and row for a row that cannot be trained on.
    """
    folder, name = os.path.split(out)
    if not name or ("://" in out and "://" not in folder):
        raise ConfigError(f"{out!r} names no file; write one such as rows.arrow")
    storage = Storage(folder or ".")
    storage.reach()
    if storage.exists(name):
        raise ConfigError(f"{out!r} exists; name another file")
    if not name.endswith(".arrow"):
        raise ConfigError(f"{out!r} does not end with .arrow, and `learn` reads no other file; name it {name}.arrow")
    params = prompts.params if prompts.name == "file" else {}
    source = prompt_source(Plugin(name="file", params={**params, "path": path}), field="prompts")
    formatter = load_formatter(model)
    groups: dict[str, tuple[int, list[dict[str, Any]]]] = {}
    for index in range(len(source)):
        prompt = source[index]
        named = prompt.columns.get("group")
        key = [prompt.messages, prompt.text] if named is None else named
        number, rows = groups.setdefault(json.dumps(key), (len(groups), []))
        prompt = replace(prompt, prompt_id=rows[0]["prompt_id"]) if rows else prompt
        try:
            rows.append(_row(prompt, formatter, group=number, sample=len(rows)))
        except DataError as error:
            raise DataError(f"{path}, row {index}: {error}") from error
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        for _, rows in groups.values():
            writer.write_batch(to_batch(rows))
    storage.write_file(name, sink.getvalue())
    return len(groups), len(source)


def _row(prompt: Prompt, formatter: "ChatFormatter", *, group: int, sample: int) -> dict[str, Any]:
    completion, reward = prompt.columns.get("completion"), prompt.columns.get("reward")
    if not isinstance(completion, str):
        raise DataError(f"completion is {str(completion)[:80]!r}; it must be a text")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise DataError(f"reward is {str(reward)[:80]!r}; it must be a finite number")
    encoded, token_ids = formatter.encode(prompt), formatter.encode_completion(prompt, completion)
    now = int(time.time() * 1e6)
    return {
        "run_id": "import",
        "group_id": f"{group:08d}",
        "ticket_index": group,
        "sample_index": sample,
        "prompt_id": prompt.prompt_id,
        "prompt_token_ids": encoded.token_ids,
        "completion_token_ids": token_ids,
        "loss_mask": [True] * len(token_ids),
        "policy_versions": [0] * len(token_ids),
        "reward": float(reward),
        "reward_status": str(RewardStatus.OK),
        "reward_components": [],
        "finish_reason": str(FinishReason.STOP),
        "prompt_text": encoded.text,
        "completion_text": formatter.decode(token_ids),
        "info": json.dumps(
            {key: value for key, value in prompt.columns.items() if key not in ("completion", "reward")}
        ),
        "worker": "import",
        "started_at": now,
        "finished_at": now,
        "seed": 0,
    }


def _finished(group: pa.RecordBatch) -> pa.RecordBatch:
    """The group without trajectories that have a reward though they were aborted: the learner leaves them out."""
    statuses, reasons = group["reward_status"].to_pylist(), group["finish_reason"].to_pylist()
    kept = [
        row
        for rows in episodes(group)
        if statuses[rows.start] != RewardStatus.OK or all(reasons[each] != FinishReason.ABORTED for each in rows)
        for row in rows
    ]
    return group if len(kept) == len(group) else group.take(pa.array(kept, type=pa.int64()))


def _refuse_mixed_samplers(groups: Sequence[pa.RecordBatch], *, place: str) -> None:
    """Raises ConfigError if only some trajectories have log-probs of the policy that sampled them: each step mixes groups of all files."""
    columns = [group.filter(pc.is_valid(group["reward"]))["rollout_logprobs"] for group in groups]
    num_rows, num_null = sum(map(len, columns)), sum(column.null_count for column in columns)
    if 0 < num_null < num_rows:
        raise ConfigError(
            f"recorded={place!r}: {num_null} of {num_rows} trajectories have no rollout_logprobs, the others have; "
            "put the two kinds into two folders, and learn from one"
        )


def _read(place: str, *, seen: Callable[[pa.Buffer], None]) -> Iterator[pa.RecordBatch]:
    """The groups of all files. Calls `seen` with the bytes of each file."""
    folder, name = os.path.split(place)
    is_file = place.endswith(".arrow")
    files, names = Storage((folder or ".") if is_file else place), [name]
    files.reach()
    if not is_file:
        within = f"{TRAJECTORIES}/" if files.exists(RUN_YAML) else ""
        names = [within + each for each in files.names(within) if each.endswith(".arrow")]
        if within and not files.is_local:
            # A step's file that no record names was written by a driver that was taken for dead.
            recorded = {record.trajectories for record in Ledger(RunDirectory(place)).records()}
            names = [each for each in names if each in recorded or step_of(each.removeprefix(within)) is None]
    for each in names:
        try:
            content = files.read_file(each)
            seen(content)
            batches = _batches(content)
        except StorageError as error:
            raise ConfigError(f"recorded={place!r}: {error}") from error
        except DataError as error:
            raise DataError(f"{files.path(each)}: {error}") from error
        places: dict[str, dict[int, list[int]]] = {}
        for number, batch in enumerate(batches):
            for row, group_id in enumerate(batch["group_id"].to_pylist()):
                places.setdefault(group_id, {}).setdefault(number, []).append(row)
        for group in places.values():
            # From each batch alone: `take` on the whole table would copy all of it for each group.
            found = pa.Table.from_batches([batches[number].take(rows) for number, rows in group.items()])
            # `cast`: nullability of an older file's columns may differ.
            yield found.cast(SCHEMA).combine_chunks().to_batches()[0]


def _batches(content: pa.Buffer) -> list[pa.RecordBatch]:
    """Batches of an untrusted file. Raises DataError if it cannot be read or breaks the schema."""
    try:
        with pa.ipc.open_file(content) as reader:
            found = [reader.get_batch(place) for place in range(reader.num_record_batches)]
        for batch in found:
            # A wrong offset would read beyond the end of the file.
            batch.validate(full=True)
        return [validate(batch) for batch in found]
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(f"a damaged file of trajectories: {headline(error)}") from error

"""Reward service: groups of trajectories in, columns with their rewards out.

A judge that raises gives the status `error`, a judge that overruns its deadline `timeout`; neither is ever a zero. Each part's judge runs
in its own processes.
"""

import asyncio
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.processes.printed import PrintedLines
from actors.reward_service.episodes import credited, own_of, total
from actors.reward_service.judgement import Judged, failed
from actors.reward_service.judging import Judging
from actors.reward_service.recipe import Part, names_for, parts_of, reward_of
from cluster.contracts import schema
from cluster.contracts.errors import DataError, TreadwheelError, WorkerError, headline
from cluster.contracts.phases import Timeline
from cluster.contracts.plugins import OF_ONE_OR_ALL
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.segments import episodes, whole
from cluster.contracts.types import PartStats, Progress, Reward, RewardStatus, Scores
from cluster.record.verdicts import remember
from cluster.supervision.tasks import all_or_none

_PATIENCE_S = 0.2
"""How long a call of `score_several` waits for a judged group. New groups wait meanwhile."""
_GATHER_S = 0.02
"""How long the first judged group then waits for others."""
_FIELDS = {
    "prompt": "prompt_text",
    "completion": "completion_text",
    "token_ids": "completion_token_ids",
    "finish_reason": "finish_reason",
    "seed": "seed",
}
"""A judge's argument to its column in the schema."""
Columns = tuple[pa.RecordBatch, dict[str, Any]]
"""Reward columns of a group, and the values of the GroupSummary fields that follow from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A group as judges see it: the prompt's columns, and its finished trajectories with the names of `OF_ONE_OR_ALL`."""

    columns: Mapping[str, Any]
    trajectories: Sequence[Mapping[str, Any]]


class RewardService:
    """All judges of a run."""

    def __init__(self, config: RewardConfig, *, name: str = "reward_service") -> None:
        self._config = config
        self._name = name
        self._num_scored = 0
        self._printed = PrintedLines()
        self._num_waiting = 0
        self._last_progress = time.time()
        self.timeline = Timeline("idle")
        self._judges: dict[Part, Judging] = {}
        self._starting = asyncio.Lock()
        self._known: dict[str, str] = {}
        self._scoring: dict[asyncio.Task[Columns], int] = {}
        """Open tasks of `score_several`, with the groups' numbers."""

    async def warm_up(self) -> None:
        """Starts a process of each judge now, before the first batch waits for it.

        Raises ConfigError if a judge does not import or its parameters do not fit, WorkerError if its process does not start.
        """
        async with self._starting:
            if not self._judges:
                parts = parts_of(self._config)
                starting = (Judging.start(part, self._config, self._known, printed=self._printed) for part in parts)
                started = await all_or_none(starting, end=lambda judging: judging.close())
                self._judges = dict(zip(parts, started, strict=True))

    @property
    def asks(self) -> frozenset[str]:
        """Names of the arguments of all judges, once they are up."""
        return frozenset[str]().union(*(judging.asks for judging in self._judges.values()))

    @property
    def wanted(self) -> list[str]:
        """The arguments among `asks` that belong to a trajectory, in the singular form."""
        asks = self.asks
        return [one for one, every in OF_ONE_OR_ALL.items() if {one, every} & asks]

    async def score_several(
        self, asked: Sequence[tuple[int, Sequence[Scores]]], *batches: pa.RecordBatch
    ) -> list[tuple[int, Columns | TreadwheelError]]:
        """Begins to judge these groups. Returns all groups judged by now, also those of earlier calls: each group's number, and its columns
        or the error that ended its judging.

        Waits up to `_PATIENCE_S` for the first judged group, then `_GATHER_S` for others. So a slow group delays no other.
        """
        for (number, scores), batch in zip(asked, batches, strict=True):
            self._scoring[asyncio.create_task(self.score(batch, scores))] = number
        await asyncio.wait(self._scoring, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(self._scoring, timeout=_GATHER_S)
        judged = [task for task in self._scoring if task.done()]
        return [(self._scoring.pop(task), self._outcome(task)) for task in judged]

    def _outcome(self, scored: asyncio.Task[Columns]) -> Columns | TreadwheelError:
        error = scored.exception()
        if error is None:
            return scored.result()
        if isinstance(error, TreadwheelError):
            return error
        what = f"{self._name} failed in 'score': {type(error).__name__}: {headline(error)}"
        return WorkerError(what, details="".join(traceback.format_exception(error)))

    async def score(self, batch: pa.RecordBatch, scores: Sequence[Scores] = ()) -> Columns:
        """Scores one group: reward, status, components and message of every row. Groups may be scored concurrently.

        A trajectory is judged once, with all its segments. A trajectory that failed during sampling is not judged, and keeps its status and
        message. The rewards of environment and judges are added. `scores` has the scores of reward models, one entry a trajectory; it is
        empty if no part of the group's recipe reads them.
        """
        await self.warm_up()
        wanted = self.wanted
        schema.validate(batch, ["info", "prompt_text", *(_FIELDS.get(name, "completion_text") for name in wanted)])
        trajectories = whole(batch)
        own = own_of(trajectories)
        judged: dict[int, Reward] = {}
        stats: dict[str, PartStats] = {}
        judges_all = self._config.judges_episodes
        living = [
            place for place, each in enumerate(own) if each.failure is None and (judges_all or not each.is_episode)
        ]
        if living:
            # Selecting rows of all columns costs as much as a fast judge: skip it if all rows are selected.
            asked_of = trajectories if len(living) == len(own) else trajectories.take(pa.array(living))
            asked = _asked(asked_of, wanted, [scores[place] for place in living if scores])
            of_living, stats = await self.judge(asked)
            judged = dict(zip(living, of_living, strict=True))
        weight = self._config.environment_weight
        of_each = [total(each, judged.get(place), weight=weight) for place, each in enumerate(own)]
        rewards = [reward for reward, rows in zip(of_each, episodes(batch), strict=True) for _ in rows]
        credit = credited(batch, of_each)
        columns = schema.columns_of(
            batch,
            reward=[reward.value for reward in rewards],
            reward_status=[str(reward.status) for reward in rewards],
            reward_components=[list(reward.components.items()) for reward in rewards],
            reward_message=[reward.message for reward in rewards],
            **({} if credit is None else {"token_rewards": credit}),
        )
        return columns, schema.added(columns) | {"part_stats": stats}

    async def note_servers(self, servers: Mapping[str, Sequence[str]]) -> None:
        """Sets the base URLs of the run's own servers by name, each with its bearer token as the URL's password. They apply to waiting
        groups too. A listed server may be down for the moment."""
        await self.warm_up()
        for judging in self._judges.values():
            judging.servers = servers

    def remember(self, verdicts: Mapping[str, str]) -> None:
        """Adds verdicts of the run, by their keys, which are then not asked for again."""
        remember(self._known, verdicts)

    async def judge(self, asked: Asked) -> tuple[list[Reward], dict[str, PartStats]]:
        """The group's rewards, and the statistics of each part by its name."""
        await self.warm_up()
        self.timeline.enter("judging")
        size = len(asked.trajectories)
        self._num_waiting += size
        try:
            return await self._judged(asked)
        finally:
            self._num_waiting -= size
            self._num_scored += size
            self._last_progress = time.time()
            if not self._num_waiting:
                self.timeline.enter("idle")

    def progress(self) -> Progress:
        # Each row has its own deadline, so a service that answers while rows wait does not hang.
        last_progress = time.time() if self._num_waiting else self._last_progress
        holds = tuple(judging.hold for judging in self._judges.values() if judging.hold)
        phase, since = self.timeline.phase
        awaited = "".join(f", {hold.part or 'the judge'} waits for {hold.endpoint}" for hold in holds)
        return Progress(
            actor=self._name,
            phase="holding" if holds else phase,
            policy_version=0,
            since=min([hold.since for hold in holds], default=since),
            last_progress=last_progress,
            pid=os.getpid(),
            detail=f"{self._num_waiting} trajectories waiting, {self._num_scored} judged{awaited}",
            holds=holds,
            printed=self._printed.last(),
        )

    async def close(self) -> None:
        """Ends the judges' processes."""
        await asyncio.gather(*(judging.close() for judging in self._judges.values()))

    async def _judged(self, asked: Asked) -> tuple[list[Reward], dict[str, PartStats]]:
        size = len(asked.trajectories)
        try:
            names = names_for(self._config, asked.columns)
        except DataError as error:
            return [failed(error, stage="recipe")] * size, {}
        recipe = [part for part in self._judges if part.name in names]
        verdicts: dict[Part, Judged] = {}
        stats: dict[str, PartStats] = {}
        # Parts that read the rewards of other parts run last.
        for is_after in (False, True):
            parts = [part for part in recipe if ("rewards" in self._judges[part].asks) is is_after]
            others = {str(part.name): verdicts[part] for part in verdicts}
            judged = await asyncio.gather(*(self._part(part, asked, others) for part in parts))
            for part, (verdict, of_part) in zip(parts, judged, strict=True):
                verdicts[part], stats[part.name or ""] = verdict, of_part
        return reward_of({part: verdicts[part] for part in recipe}, size=size), stats

    async def _part(self, part: Part, asked: Asked, others: Mapping[str, Judged]) -> tuple[Judged, PartStats]:
        began = time.monotonic()
        judging, rows = self._judges[part], asked.trajectories
        shared = json.dumps({"columns": asked.columns} if "columns" in judging.asks else {}, sort_keys=True)
        values = {name: _values(judged, len(rows)) for name, judged in others.items()}
        if judging.is_of_groups:
            given: dict[str, Any] = {
                every: [row[one] for row in rows] for one, every in OF_ONE_OR_ALL.items() if every in judging.asks
            }
            if "rewards" in judging.asks:
                given["rewards"] = values
            (verdict,), new = await judging.judge(shared, [(len(rows), given)])
            return verdict, _stats(verdict, new, began)
        calls = [(1, {name: row[name] for name in OF_ONE_OR_ALL if name in judging.asks}) for row in rows]
        if "rewards" in judging.asks:
            for row, (_, given) in enumerate(calls):
                given["rewards"] = {name: each[row] for name, each in values.items()}
        judged, new = await judging.judge(shared, calls)
        verdict = [reward for each in judged for reward in each or ()]
        return verdict, _stats(verdict, new, began)


def conversation(columns: Mapping[str, Any], *, prompt: str, completion: str) -> list[Any]:
    """The prompt's messages, or its text as a user message, followed by the completion as the assistant's message."""
    asked = columns.get("messages") or [{"role": "user", "content": prompt}]
    return [*asked, {"role": "assistant", "content": completion}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A trajectory as text."""

    prompt: str
    completion: str
    """For an episode, the model's last message: the texts of environments and tools are not the model's."""
    messages: list[Any]


def told(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> list[Told]:
    """The text of each row, which must be a whole trajectory. `columns` are the prompt's."""
    found: list[Told] = []
    for row in batch.select(["prompt_text", "completion_text", "messages"]).to_pylist():
        prompt, completion = row["prompt_text"], row["completion_text"]
        if row["messages"] is None:
            messages = conversation(columns, prompt=prompt, completion=completion)
        else:
            messages = json.loads(row["messages"])
            said = (each["content"] for each in reversed(messages) if each["role"] == "assistant")
            completion = str(next(said, None) or "")
        found.append(Told(prompt=prompt, completion=completion, messages=messages))
    return found


def _values(judged: Judged, size: int) -> list[float | None]:
    return [None] * size if judged is None else [reward.value for reward in judged]


def _stats(judged: Judged, new: Mapping[str, str], began: float) -> PartStats:
    failures = [reward for reward in judged or () if reward.status is not RewardStatus.OK]
    return PartStats(seconds=time.monotonic() - began, num_failed=len(failures), verdicts=new)


def _asked(batch: pa.RecordBatch, wanted: Sequence[str], scores: Sequence[Scores]) -> Asked:
    """The group, with only the `wanted` fields of its trajectories: token ids are expensive, and few judges read them."""
    columns = schema.info_of(batch, 0)
    of_each = {name: batch[_FIELDS[name]].to_pylist() for name in wanted if name in _FIELDS}
    said = told(batch, columns) if {"completion", "messages"} & {*wanted} else []
    if "completion" in wanted:
        of_each["completion"] = [each.completion for each in said]
    if "messages" in wanted:
        of_each["messages"] = [each.messages for each in said]
    if "scores" in wanted:
        of_each["scores"] = scores or [{}] * batch.num_rows
    rows = range(batch.num_rows)
    trajectories = [{name: each[row] for name, each in of_each.items()} for row in rows]
    return Asked(columns=columns, trajectories=trajectories)

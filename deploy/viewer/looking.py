"""Searches a run's recorded trajectories, the newest step first, up to the limits of one answer."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException

from cluster.contracts.errors import DataError, StorageError
from deploy.viewer.runs import Run
from deploy.viewer.steps import RecordedStep, Trajectory, num_readable, open_step

_COLUMNS = ("sample_index", "reward", "worker", "prompt_text", "completion_text", "environment", "failed_stage")
_MOST_FOUND = 30
_MOST_TRAJECTORIES, _MOST_CHARACTERS = 20_000, 50_000_000
"""Most trajectories, and most bytes of their texts, that one answer searches."""
_MOST_STEPS = 200
_AROUND = 160
"""Characters shown on each side of a match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions that a trajectory must meet, all of them. None and "" are no condition."""

    text: str = ""
    """In its completion or its prompt; case does not matter."""
    min_reward: float | None = None
    max_reward: float | None = None
    worker: str = ""
    staleness: int | None = None
    """The least staleness."""
    environment: str = ""
    failed_stage: str = ""
    """A stage (`tool:search`), or the part before its colon (`tool`, for every tool)."""
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the next answer begins: a step, and how many of its groups were searched already."""

    step: int
    num_groups: int = 0


@dataclass(slots=True, kw_only=True)
class Answer:
    found: list[dict[str, Any]]
    num_trajectories: int = 0
    """Number of trajectories that were searched."""
    first_step: int | None = None
    """The oldest step that was searched, in part or in full."""
    damaged: list[str] = field(default_factory=list)
    """Errors of the steps that could not be searched, one sentence each."""
    further: Place | None = None
    """None: the search is complete."""


def look(run: Run, wanted: Wanted, steps: Sequence[int], *, start: Place | None = None) -> Answer:
    """Searches `steps`, which are sorted, backwards from the newest or from `start`."""
    newest = start.step if start else wanted.last_step
    asked = [
        step
        for step in reversed(steps)
        if (newest is None or step <= newest) and (wanted.first_step is None or step >= wanted.first_step)
    ]
    answer = Answer(found=[])
    num_characters = 0
    most = num_readable(run, asked[0], most=_MOST_STEPS) if asked else 0
    for step in asked[:most]:
        first = start.num_groups if start and step == start.step else 0
        try:
            for place, (ticket, rows, recorded) in enumerate(_groups(run, step, first), start=first):
                if (
                    len(answer.found) >= _MOST_FOUND
                    or answer.num_trajectories >= _MOST_TRAJECTORIES
                    or num_characters >= _MOST_CHARACTERS
                ):
                    answer.further = Place(step=step, num_groups=place)
                    return answer
                answer.first_step = step
                answer.num_trajectories += rows.num_rows
                num_characters += rows.nbytes
                answer.found += _matches(recorded, ticket, rows, wanted)
        except (DataError, StorageError) as error:
            answer.damaged.append(str(error))
    if len(asked) > most:
        answer.further = Place(step=asked[most])
    return answer


def _groups(run: Run, step: int, first: int) -> Iterator[tuple[int, pa.RecordBatch, RecordedStep]]:
    try:
        recorded = open_step(run, step)
    except HTTPException:  # removed since the steps were listed
        return
    for ticket in recorded.tickets[first:]:
        yield (ticket, recorded.columns(ticket, *_COLUMNS), recorded)


def _matches(recorded: RecordedStep, ticket: int, rows: pa.RecordBatch, wanted: Wanted) -> list[dict[str, Any]]:
    kept = rows.filter(_is_wanted(rows, wanted))
    if kept.num_rows == 0:
        return []
    by_sample = {each.sample_index: each for each in recorded.group(ticket).trajectories}
    pairs = ((row, by_sample[row["sample_index"]]) for row in kept.to_pylist())
    return [
        {
            "step": recorded.step,
            "ticket": ticket,
            "sample": each.sample_index,
            "reward": each.reward,
            "reward_status": each.reward_status,
            "worker": each.worker,
            "staleness": each.staleness,
            "num_tokens": each.num_tokens,
            "finish": each.finish_reason,
            "episode": each.episode and asdict(each.episode),
            **context(row["completion_text"], row["prompt_text"], wanted.text),
        }
        for row, each in pairs
        if _is_stale(each, wanted)
    ]


def _is_wanted(rows: pa.RecordBatch, wanted: Wanted) -> pa.Array:
    tests = [pa.array([True] * rows.num_rows)]
    if wanted.min_reward is not None:
        tests.append(pc.greater_equal(rows["reward"], wanted.min_reward))
    if wanted.max_reward is not None:
        tests.append(pc.less_equal(rows["reward"], wanted.max_reward))
    if wanted.worker:
        tests.append(pc.equal(rows["worker"], wanted.worker))
    if wanted.environment:
        tests.append(pc.equal(rows["environment"], wanted.environment))
    if wanted.failed_stage:
        stages = rows["failed_stage"]
        begins = pc.starts_with(stages, f"{wanted.failed_stage}:")
        tests.append(pc.or_(pc.equal(stages, wanted.failed_stage), begins))
    if wanted.text:
        texts = (rows["completion_text"], rows["prompt_text"])
        tests.append(pc.or_(*(pc.match_substring(text, wanted.text, ignore_case=True) for text in texts)))
    kept = tests[0]
    for test in tests[1:]:
        kept = pc.and_(kept, pc.fill_null(test, False))
    return kept


def _is_stale(trajectory: Trajectory, wanted: Wanted) -> bool:
    return wanted.staleness is None or (trajectory.staleness is not None and trajectory.staleness >= wanted.staleness)


def context(completion: str, prompt: str, text: str) -> dict[str, Any]:
    """The first `match` of `text` with the characters `before` and `after` it, and `where` it was found: in the completion, or else in the
    prompt. Then `completion` has the beginning of the completion. Without a match, `before` has it."""
    beginning = _cut(completion, 2 * _AROUND)
    for where, found_in in (("completion", completion), ("prompt", prompt)):
        if text and (found := re.search(re.escape(text), found_in, re.IGNORECASE)):
            start, end = found.span()
            return {
                "where": where,
                "before": f"…{found_in[start - _AROUND : start]}" if start > _AROUND else found_in[:start],
                "match": found_in[start:end],
                "after": _cut(found_in[end:], _AROUND),
                "completion": beginning if where == "prompt" else None,
            }
    return {"where": "completion", "before": beginning, "match": "", "after": "", "completion": None}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"

"""Steps as a recorder and a ledger leave them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from cluster.contracts.schema import to_batch
from cluster.record.ledger import NAME, Ledger, Record
from cluster.record.recorder import Recorder
from cluster.record.run_directory import RunDirectory
from deploy.viewer.runs import Run
from tests.unit.cluster.contracts.rows import row

Group = Sequence[Mapping[str, Any]]


def group(ticket: int, *rewards: float | None, **changed: Any) -> list[dict[str, Any]]:
    """One trajectory a reward; None is a judge that failed."""
    failed = {"reward_status": "error", "reward_message": "KeyError: 'answer'"}
    return [
        row(
            group_id=f"{ticket:08d}",
            ticket_index=ticket,
            prompt_id=f"p/{ticket}",
            sample_index=sample,
            reward=reward,
            **({} if reward is not None else failed),
        )
        | changed
        for sample, reward in enumerate(rewards)
    ]


def record(folder: Path | str, *steps: Sequence[Group]) -> None:
    """Appends these steps, each of groups in the order consumed."""
    directory = RunDirectory(str(folder))
    ledger, recorder = Ledger(directory), Recorder(directory)
    for groups in steps:
        _, (name, digest) = recorder.record(ledger.version + 1, *(to_batch(list(map(dict, rows))) for rows in groups))
        tickets = [rows[0]["ticket_index"] for rows in groups]
        ledger.append(groups=tickets, trajectories=name, trajectories_digest=digest)


def write_ledger(folder: Path, *, num_steps: int) -> None:
    """Of steps of one group each, whose trajectories are nowhere."""
    previous, lines = "", []
    for step in range(1, num_steps + 1):
        name = f"trajectories/step-{step:06d}.arrow"
        one = Record(
            step=step,
            groups=(step,),
            next_index=step + 1,
            trajectories=name,
            trajectories_digest="d",
            previous=previous,
        )
        previous = one.digest
        lines.append(one.line)
    RunDirectory(str(folder)).replace_lines(NAME, lines)


def opened(folder: Path | str, name: str = "run") -> Run:
    return Run(name, RunDirectory(str(folder)))


def asking(query: str = "", **path: str) -> Request:
    """A request to a page, as its function gets it."""
    return Request({"type": "http", "query_string": query.encode(), "path_params": path, "headers": []})

"""The ledger: steps with their groups and digests, the check of the chain, and which step a group trained."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from starlette.requests import Request

from cluster.record.ledger import Record
from deploy.viewer.chain import Chain, check_files, ticket_of
from deploy.viewer.page import asked_whole_number, page
from deploy.viewer.runs import Run

PER_PAGE = 50
_MOST_BYTES = 64_000_000
"""Bytes of trajectories that a page checks by itself; in an object store none."""
_MOST_BYTES_ASKED = 2_000_000_000
"""Bytes of trajectories that it checks if the reader asks for it."""
_FEW_GROUPS = 8
"""Up to so many groups are links; more are shown as ranges."""


def ledger(run: Run, request: Request) -> dict[str, Any]:
    """The query's `before` is the step after the newest one shown; `ticket` asks which step a group trained; `files=check` checks the
    trajectories of the shown steps even if that takes long."""
    chain = run.chain()
    newest = len(chain.records)
    before = min(asked_whole_number(request, "before") or newest + 1, newest + 1)
    shown = chain.records[max(before - 1 - PER_PAGE, 0) : max(before - 1, 0)][::-1]
    unasked = _MOST_BYTES if run.directory.is_local else 0
    is_asked = request.query_params.get("files") == "check"
    files = check_files(run.directory, shown, most_bytes=_MOST_BYTES_ASKED if is_asked else unasked)
    ticket = asked_whole_number(request, "ticket")
    return {
        "num_steps": newest,
        "problem": chain.problem,
        "is_torn": chain.is_torn and run.state() != "running",
        "is_asked": is_asked,
        "num_checked": sum(state != "not checked" for state in files.values()),
        "bad_files": sorted(step for step, state in files.items() if state in ("altered", "missing")),
        "rows": [_row(record, files[record.step], chain) for record in shown],
        "newer": before + PER_PAGE if before <= newest else None,
        "older": shown[-1].step if shown and shown[-1].step > 1 else None,
        "before": before,
        "ticket": None if ticket is None else answer(ticket, chain, run.events()),
        "place": run.place,
    }


def _row(record: Record, file: str, chain: Chain) -> dict[str, Any]:
    after = chain.record(record.step + 1)
    if after is None:
        vouched = "the chain breaks here" if chain.problem else "newest"
    else:
        vouched = f"step {after.step}"
    return {
        "step": record.step,
        "num_groups": len(record.groups),
        "groups": list(record.groups) if len(record.groups) <= _FEW_GROUPS else [],
        "ranges": ranges(record.groups),
        "file": record.trajectories,
        "file_digest": record.trajectories_digest,
        "file_state": file,
        "digest": record.digest,
        "previous": record.previous,
        "vouched_by": vouched,
    }


def ranges(numbers: Sequence[int]) -> str:
    """`0–15, 17–31`: the gaps are groups that were dropped."""
    ends = [
        0,
        *(place for place, (one, next_) in enumerate(pairwise(numbers), start=1) if next_ != one + 1),
        len(numbers),
    ]
    spans = [(numbers[start], numbers[end - 1]) for start, end in pairwise(ends)]
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in spans)


def answer(ticket: int, chain: Chain, events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Which step a group trained, or why it trained none, in a sentence."""
    if (step := chain.step_of(ticket)) is not None:
        return {"ticket": ticket, "step": step, "words": f"Group {ticket} trained step {step}."}
    drops = [event for event in events if event["kind"] in ("drop", "quarantine") and ticket_of(event) == ticket]
    if drops:
        words = f"Group {ticket} trained no step: it was dropped ({drops[-1]['reason']})."
    elif not chain.records or ticket >= chain.records[-1].next_index:
        words = f"Group {ticket} has trained no step yet: the last record ends before it."
    else:
        words = f"Group {ticket} trained no step, but groups before and after it did. No event says why."
    return {"ticket": ticket, "step": None, "words": words}


ROUTES = page("/run/{run}/ledger", ledger, template="ledger.html")

"""The end of a node that a run cannot do without ends the run, and the end of another node does not."""

import asyncio
from types import SimpleNamespace

import pytest

from cluster.contracts.errors import DeadlineError, PreemptedError
from deploy.cluster_up.notices import ended_by_notices
from tests.fakes import ListedEvents


def announce(monkeypatch, *answers: dict[str, float | None] | Exception) -> asyncio.Event:
    """Ray's head node gives these answers in turn, then the last one again. The event is set when all have been heard."""
    left, heard = list(answers), asyncio.Event()

    async def draining() -> dict[str, float | None]:
        if not left:
            heard.set()
        answer = left.pop(0) if left else answers[-1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("deploy.cluster_up.notices._LOOK_S", 0.0)
    monkeypatch.setattr("deploy.cluster_up.notices.draining_nodes", draining)
    monkeypatch.setattr("deploy.cluster_up.notices.drivers_node", lambda: "drives")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    return heard


RANKS = [SimpleNamespace(node_id="learns"), SimpleNamespace(node_id="learns too")]


@pytest.mark.parametrize(
    ("node_id", "deadline", "ranks", "message"),
    [
        ("drives", 1030.0, RANKS, "the driver's node drives goes away in 30 s"),
        ("drives", None, [], "the driver's node drives goes away"),
        ("learns too", 1030.0, RANKS, "a learner's node learns t goes away in 30 s"),
    ],
)
async def test_a_node_that_the_run_cannot_do_without_ends_it_with_the_nodes_deadline(
    node_id, deadline, ranks, message, monkeypatch
):
    announce(monkeypatch, {}, {"other": 1010.0, node_id: deadline})
    log = ListedEvents()
    with pytest.raises(PreemptedError, match=message) as ended:
        async with asyncio.timeout(120), ended_by_notices(lambda: ranks, log=log):
            await asyncio.Event().wait()
    assert ended.value.deadline == deadline
    (event,) = log.events
    left_s = None if deadline is None else 30.0
    assert (event["kind"], event["node_id"], event["seconds_left"]) == ("preempted", node_id, left_s)


async def test_other_nodes_that_go_away_end_nothing(monkeypatch):
    """A node where no rank is yet is one of them."""
    heard, log = announce(monkeypatch, {"other": 1010.0}, {"learns": None}), ListedEvents()
    async with asyncio.timeout(120), ended_by_notices(list, log=log):
        await heard.wait()
    assert not log.events


async def test_a_head_node_that_does_not_answer_is_asked_again(monkeypatch):
    announce(monkeypatch, DeadlineError("Ray's head node does not answer"), {"drives": None})
    log = ListedEvents()
    with pytest.raises(PreemptedError, match="the driver's node drives goes away"):
        async with asyncio.timeout(120), ended_by_notices(list, log=log):
            await asyncio.Event().wait()
    assert log.kinds() == ["steering_failed", "preempted"]
    assert log.events[0]["reason"] == "DeadlineError: Ray's head node does not answer"

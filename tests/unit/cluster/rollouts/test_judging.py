"""A group that is copied while it is judged goes on with its copy."""

import asyncio

import pytest

from cluster.contracts.errors import LostError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Group, Prompt, Ticket
from cluster.rollouts.destinations import HeldOutGroups
from cluster.rollouts.judging import Judging
from cluster.rollouts.lanes import Job
from cluster.supervision.tasks import background
from tests.fakes import group_summary


def ticket(index: int) -> Ticket:
    prompt = Prompt(prompt_id=f"p{index}", text="1+1=")
    return Ticket(
        index=index, prompt=prompt, num_trajectories=2, seed=0, policy_version=0, sampling=SamplingConfig(max_tokens=4)
    )


class Scorer:
    """Judges when it is let; its node takes `gone` with it."""

    def __init__(self, *, gone: str | None = None) -> None:
        self.may_judge = asyncio.Event()
        self.judged: list[str] = []
        self._gone = gone

    async def judge(self, ticket, group):
        self.judged.append(group.pieces[0])
        await self.may_judge.wait()
        if group.pieces[0] == self._gone:
            raise LostError("it went")
        return group.with_columns("rewards", {"size_bytes": 0})


class Kept(HeldOutGroups):
    def __init__(self) -> None:
        super().__init__(1)
        self.groups: list[Group] = []

    async def add(self, ticket, group) -> None:
        self.groups.append(group)


@pytest.mark.parametrize(("gone", "attempts"), [(None, ["batch"]), ("batch", ["batch", "copy"])])
async def test_a_copy_takes_the_place_of_what_was_sampled(gone, attempts):
    scorer, kept, lost = Scorer(gone=gone), Kept(), []
    async with background() as tasks:
        judging = Judging(scorers=scorer, tasks=tasks, lost=lambda *each: lost.append(each), wake=lambda: None)
        judging.start(Job(ticket=ticket(3), destination=kept), Group(pieces=("batch",), summary=group_summary(3)))
        await asyncio.sleep(0)
        assert judging.move(3, {"batch": "copy", "another": "x"}) and not judging.move(4, {})
        scorer.may_judge.set()
        while judging.groups():
            await asyncio.sleep(0)
    assert [group.pieces for group in kept.groups] == [("copy", "rewards")]
    assert scorer.judged == attempts and not lost


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_copy_that_is_made_while_a_group_is_added_takes_its_place_too(is_lost):
    """The reference scores it meanwhile."""

    class Slow(Kept):
        adding, may_add = asyncio.Event(), asyncio.Event()

        async def add(self, ticket, group):
            self.adding.set()
            await self.may_add.wait()
            if is_lost and group.pieces[0] == "batch":
                raise LostError("it went")
            await super().add(ticket, group)

        def move(self, ticket, copies):
            self.groups = [group.moved(copies) for group in self.groups]

    scorer, kept, lost = Scorer(), Slow(), []
    scorer.may_judge.set()
    async with background() as tasks:
        judging = Judging(scorers=scorer, tasks=tasks, lost=lambda job, _: lost.append(job), wake=lambda: None)
        judging.start(Job(ticket=ticket(3), destination=kept), Group(pieces=("batch",), summary=group_summary(3)))
        await kept.adding.wait()
        assert judging.move(3, {"batch": "copy"})
        kept.may_add.set()
        while judging.groups():
            await asyncio.sleep(0)
    assert [group.pieces for group in kept.groups] == [("copy", "rewards")] and not lost


async def test_a_group_that_was_not_copied_in_time_is_lost():
    scorer, lost = Scorer(gone="batch"), []
    scorer.may_judge.set()
    async with background() as tasks:
        judging = Judging(scorers=scorer, tasks=tasks, lost=lambda job, _: lost.append(job), wake=lambda: None)
        job = Job(ticket=ticket(3), destination=Kept())
        judging.start(job, Group(pieces=("batch",), summary=group_summary(3)))
        while judging.groups():
            await asyncio.sleep(0)
    assert lost == [job] and scorer.judged == ["batch"]

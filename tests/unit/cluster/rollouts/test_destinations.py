"""A failed reward is not a zero, and each group that is not trained on is told of."""

import asyncio

import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.types import ActorKind, Group, RewardFailure
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import TrainingGroups
from tests.fakes import ScriptedScorer, group_summary
from tests.unit.cluster.rollouts.scene import Scene, refusal, settled
from tests.unit.cluster.simulated_time import simulated


@simulated
async def test_a_refused_prompt_is_left_out_of_an_evaluation():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == -2 else None)
    async with scene.running():
        held_out = await scene.evaluate(3)
    assert len(held_out.summaries) == 2 and held_out.num_dropped == 1
    assert scene.events.kinds() == ["quarantine"]


@pytest.mark.parametrize("choose", [None, lambda summary: [0]])
@simulated
async def test_pass_rates_are_measured_of_all_candidates_also_of_a_group_that_a_filter_drops(choose):
    """Candidates are metrics of their own only where some are chosen."""
    measured, nothing = [], None
    scene, buffer = Scene(), Buffer(groups_per_step=1)
    destination = TrainingGroups(
        buffer,
        scorers=nothing,
        dropped_by=lambda summary: "filter",
        choose=choose,
        wants_reference=lambda index: True,
        max_failed_share=0.5,
        measure=lambda index, summary: measured.append((index, summary.rewards)),
        events=scene.events,
    )
    (ticket,) = await scene.office.tickets(buffer.start(), policy_version=0)
    await destination.add(ticket, Group(pieces=(0,), summary=group_summary(0, rewards=(1.0, 0.0))))
    assert measured == [(0, (1.0, 0.0))] and scene.events.kinds() == ["drop"]
    assert ("buffer/candidate_reward" in buffer.drain_stats()) is (choose is not None)


@simulated
async def test_failed_rewards_are_dropped_never_zero():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(None, None), num_reward_errors=1, num_reward_timeouts=1)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [1, 2, 3, 4]
    assert scene.events.kinds() == ["reward_failure", "drop"]


@simulated
async def test_some_failed_rewards_train_with_the_others():
    rewards = (1.0, None, 0.0, 1.0)
    scene = Scene(score=lambda i: group_summary(i, num_trajectories=4, rewards=rewards, num_reward_errors=1))
    assert await scene.take() == [0, 1, 2, 3]


@simulated
async def test_a_reward_that_is_left_alone_is_dropped():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(1.0, None), num_reward_errors=1)
        return group_summary(index, rewards=(1.0, 0.0))

    assert await Scene(score=score).take() == [1, 2, 3, 4]


@simulated
async def test_a_reward_that_always_fails_ends_the_run_and_says_so():
    typo = RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=2)
    scene = Scene(score=lambda i: group_summary(i, rewards=(None, None), num_reward_errors=2, reward_failures=(typo,)))
    with pytest.raises(DataError, match="last one because: 2 of 2 rewards failed: KeyError: 'anser'"):
        await scene.take()
    failures = [event for event in scene.events.events if event["kind"] == "reward_failure"]
    assert failures[0]["failures"] == [{"kind": "KeyError", "message": "KeyError: 'anser'", "count": 2}]
    shown = [event["message"] for event in failures if "message" in event]
    assert shown == ["prompt 'p0': 2 of 2 rewards failed: KeyError: 'anser'"], "each kind once a run on the console"


@simulated
async def test_groups_without_variance_are_sampled_again():
    dropped_by = lambda summary: "zero_variance" if len(set(summary.rewards)) == 1 else None
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, float(i % 2))), dropped_by=dropped_by)
    assert await scene.take() == [0, 2, 4, 6]
    assert {event["reason"] for event in scene.events.events if event["kind"] == "drop"} == {"zero_variance"}


@simulated
async def test_a_run_whose_filter_drops_everything_gives_up_and_names_the_filter_and_the_limit():
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, 1.0)), dropped_by=lambda summary: "zero_variance")
    with pytest.raises(
        DataError, match=r"8 groups in a row were dropped \(zero_variance: 8\).*buffer\.max_dropped_steps=2 "
    ):
        await scene.take(max_dropped_steps=2)


@simulated
async def test_a_group_is_chosen_before_a_filter_sees_it_and_what_was_not_chosen_is_gone():
    """Of three trajectories the best and the worst make the group: 1 and 0, or 1 and 1, which the filter drops."""
    scene = Scene(
        score=lambda i: group_summary(
            i,
            num_trajectories=3,
            rewards=(1.0, 0.5 - i % 2, 1.0 * (i % 2)),
            num_reward_errors=i % 2,
            num_reward_timeouts=1 - i % 2,
        ),
        choose=lambda summary: [0, 2],
        dropped_by=lambda summary: "zero_variance" if len(set(summary.rewards)) == 1 else None,
    )
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        taken = await buffer.take(4)
    assert [(index, group.summary.rewards) for index, group in taken] == [(i, (1.0, 0.0)) for i in (0, 2, 4, 6)]
    assert taken[1][1].pieces == (2, "reward-0 of 2", [0, 2])
    stats = buffer.drain_stats()
    assert stats["buffer/candidate_reward"] == 0.5, "of all three, in each group"
    names = ("buffer/num_judged", "reward/num_errors", "reward/num_timeouts")
    assert [stats[name] for name in names] == [21.0, 3.0, 4.0]


@simulated
async def test_candidates_whose_group_is_dropped_for_its_failed_rewards_count_too():
    """Of group 0 one reward of three is known, of group 1 none."""
    judged = [
        group_summary(0, num_trajectories=3, rewards=(0.25, None, None), num_reward_errors=2),
        group_summary(1, num_trajectories=3, rewards=(None, None, None), num_reward_timeouts=3),
    ]
    scene = Scene(
        score=lambda i: judged[i] if i < 2 else group_summary(i, num_trajectories=3, rewards=(1.0, 0.5, 0.0)),
        choose=lambda summary: [0, 2],
    )
    buffer = Buffer(groups_per_step=1)
    async with scene.generating(buffer):
        taken = await buffer.take(1)
    stats = buffer.drain_stats()
    assert [index for index, _ in taken] == [2] and stats["buffer/dropped_rewards_failed"] == 2.0
    names = ("buffer/num_judged", "reward/num_errors", "reward/num_timeouts", "buffer/candidate_reward")
    assert [stats[name] for name in names] == [9.0, 2.0, 3.0, 1.75 / 4]


@simulated
@pytest.mark.parametrize("max_off_policy_steps", [0, 1])
async def test_the_reference_scores_the_groups_that_want_it_and_no_others(max_off_policy_steps):
    """Group 1 is dropped."""
    scored = []

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            if self.spec.kind is ActorKind.REFERENCE_SCORER:
                scored.append(object_ref)
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(
        make_scorer=Scorer,
        wants_reference=lambda index: index // 4 in (0, 2),
        dropped_by=lambda summary: "filter" if summary.group_id == "00000001" else None,
    )
    assert await scene.take(num_steps=3, max_off_policy_steps=max_off_policy_steps) == [0, *range(2, 13)]
    assert sorted(scored) == [0, 2, 3, 8, 9, 10, 11]


@simulated
async def test_a_reference_scorer_that_waits_for_the_learner_is_the_last_to_start():
    learner_up, kinds = asyncio.Event(), []

    def make_scorer(spec, *arguments, **more):
        kinds.append(spec.kind)
        return ScriptedScorer(spec, *arguments, **more)

    scene = Scene(
        make_scorer=make_scorer,
        wants_reference=lambda index: True,
        reference_waits_for=learner_up,
        reward={"judge": {"name": "reward_model", "model": "kind"}, "models": {"kind": {"path": "a"}}},
    )
    async with asyncio.TaskGroup() as tasks:
        up = asyncio.Event()
        tasks.create_task(until_up(scene, up))
        await settled()
        assert {*kinds} == {ActorKind.REWARD_SERVICE, ActorKind.REWARD_MODEL}
        assert len(scene.workers) == 1 and not up.is_set()
        learner_up.set()
        await up.wait()
    assert kinds[2:] == [ActorKind.REFERENCE_SCORER]


async def until_up(scene, up):
    async with scene.running():
        up.set()

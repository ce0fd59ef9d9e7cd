"""No group is lost and none comes twice, whatever dies on its way."""

import asyncio

import pytest

from cluster.contracts.errors import DataError, DeadlineError
from cluster.contracts.types import EngineUse, PartStats, Printed, Progress
from cluster.rollouts.buffer import Buffer
from tests.fakes import death, group_summary
from tests.unit.cluster.rollouts.scene import Scene, refusal
from tests.unit.cluster.simulated_time import simulated


@simulated
async def test_every_group_comes_once_and_in_order():
    assert await Scene(num_workers=3).take(num_steps=3) == list(range(12))


@simulated
async def test_a_group_is_asked_for_under_the_version_that_it_starts_under():
    asked = {}
    scene = Scene(script=lambda ticket: asked.update({ticket.index: ticket.policy_version}))
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1)
    async with scene.generating(buffer):
        for version in (1, 2):
            await buffer.take(4)
            buffer.advance(version)
            await asyncio.sleep(60)
    assert [asked[index] for index in range(16)] == [0] * 8 + [1] * 4 + [2] * 4, "two steps start at once"


@simulated
async def test_a_run_begins_when_one_of_its_reward_services_is_up():
    class OneNeverComes(Scene):
        async def _start(self, spec):
            if spec.name == "reward-1":
                await asyncio.Event().wait()
            return await super()._start(spec)

    scene = OneNeverComes(num_services=2)
    async with scene.running():
        assert [member.name for member in scene.production.services.serving()] == ["reward-0"]


@simulated
async def test_all_parts_of_a_run_tell_their_metrics_and_verdicts_are_kept():
    kept, verdicts = [], {"p": "2.0"}
    part = PartStats(seconds=2.0, num_failed=0, verdicts=verdicts)
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, 0.0), part_stats={"style": part}))
    buffer = Buffer(groups_per_step=2)
    async with scene.generating(buffer):
        scene.production._scorers._keep = kept.append
        await buffer.take(2)
        stats = scene.production.drain_stats()
    assert stats["time/style/judging_s"] == 2.0 and kept == [verdicts] * 2
    assert stats.keys() >= {"rollout/idle_share", "rollout/spot_evictions", "supervision/num_restarts"}


@simulated
async def test_slow_rewards_slow_sampling_and_nothing_grows():
    scene = Scene(num_workers=3, score=lambda i: group_summary(i, rewards=(1.0, 0.0), size_bytes=100))
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1)
    scene.judging.clear()
    async with scene.generating(buffer):
        for _ in range(100):
            await asyncio.sleep(0)
        sampled = sum(len(call) for worker in scene.workers for call in worker.calls)
        assert sampled == 8, "the window of two steps, and not one group more"
        assert buffer.size_bytes == 8 * 100, "what waits for its reward counts"
        scene.judging.set()
        await buffer.take(4)


@simulated
async def test_a_long_wait_names_what_every_actor_does():
    scene = Scene(script=lambda ticket: None)
    scene.judging.clear()
    buffer = Buffer(groups_per_step=2)
    async with scene.generating(buffer):
        with pytest.raises(
            DeadlineError, match="waits for 2 groups at policy version 0 and has 0; nothing moved for 5 s"
        ):
            await buffer.take(2, stall_s=5.0)
        assert "rollout-0 never reported progress" in scene.production.describe()


@simulated
async def test_how_full_engines_are_is_the_sum_of_what_their_workers_said_and_the_fullest_cache():
    scene = Scene(num_workers=3)
    async with scene.running():
        for worker, use in zip(
            scene.workers, (EngineUse(num_running=2, cache_share=0.5), EngineUse(num_running=3)), strict=False
        ):
            worker.last_progress = Progress(
                actor=worker.name, phase="sampling", policy_version=1, since=0.0, last_progress=0.0, pid=1, engine=use
            )
        stats = scene.production.drain_stats()
    assert {name: value for name, value in stats.items() if name.startswith("engine/")} == {
        "engine/num_running": 5.0,
        "engine/num_waiting": 0.0,
        "engine/cache_share": 0.5,
    }


@simulated
async def test_what_environments_print_is_told_as_what_judges_print():
    """Seen in review: rollout workers said it with each heartbeat, and nobody heard it."""
    scene = Scene(num_workers=1)
    async with scene.running():
        for place in scene.production.places():
            assert place.actor is not None
            name = place.spec.name
            printed = Printed(lines=(f"by {name}",), num_lines=1)
            place.actor.last_progress = Progress(
                actor=name, phase="busy", policy_version=1, since=0.0, last_progress=0.0, pid=1, printed=printed
            )
        scene.production.note_progress()
    told = [event["lines"] for event in scene.events.events if event["kind"] == "printed"]
    assert told == [["by reward-0"], ["by rollout-0"]]


@simulated
@pytest.mark.parametrize("waits", ["take", "evaluate"])
async def test_a_run_that_waits_for_nodes_outlives_a_time_without_any_worker(waits):
    """Its only worker dies, and the next one's node takes 1000 s; otherwise 300 s without anything that moves are too long."""
    scene = Scene(may_wait_for_nodes=True)
    buffer = Buffer(groups_per_step=2)
    async with scene.running():
        scene.coming.clear()
        scene.fleet.replace(scene.workers[0], death("rollout-0"))
        asyncio.get_running_loop().call_later(1000, scene.coming.set)
        if waits == "evaluate":
            assert len((await scene.evaluate(3, stall_s=300.0)).summaries) == 3
        else:
            async with scene.production.generating(into=buffer):
                taken = await buffer.take(2, stall_s=300.0, goes_on=scene.production.waits_for_nodes)
            assert [index for index, _ in taken] == [0, 1]
    said = [event["message"] for event in scene.events.events if event["kind"] == "waiting_for_nodes"]
    assert said == ["no rollout worker serves, 1 are to come: the run goes on when one has a node"] * 3


@simulated
async def test_a_run_that_waits_for_nodes_ends_when_nothing_moves_although_a_worker_serves():
    scene = Scene(may_wait_for_nodes=True)
    scene.judging.clear()
    async with scene.running():
        with pytest.raises(DeadlineError, match="nothing moved for 300 s"):
            await scene.evaluate(3, stall_s=300.0)


@simulated
async def test_prompts_that_are_all_refused_end_the_run_and_blame_no_worker():
    scene = Scene(script=refusal)
    with pytest.raises(
        DataError, match=r"80 groups in a row were dropped \(refused: 80\), the last one because: refused"
    ):
        await scene.take()
    assert "failure" not in scene.events.kinds()

"""No group is lost and none comes twice, whatever dies on its way."""

import asyncio

import pytest

from cluster.contracts.errors import DataError, DeadlineError
from cluster.rollouts.buffer import Buffer
from tests.fakes import group_summary
from tests.unit.cluster.rollouts.scene import Scene, refusal
from tests.unit.cluster.simulated_time import simulated


@simulated
async def test_every_group_comes_once_and_in_order():
    assert await Scene(num_workers=3).take(num_steps=3) == list(range(12))


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
async def test_prompts_that_are_all_refused_end_the_run_and_blame_no_worker():
    scene = Scene(script=refusal)
    with pytest.raises(
        DataError, match=r"80 groups in a row were dropped \(refused: 80\), the last one because: refused"
    ):
        await scene.take()
    assert "failure" not in scene.events.kinds()

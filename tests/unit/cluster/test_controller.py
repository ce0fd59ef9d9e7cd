"""The loop with everything around it scripted."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contracts.errors import DeadlineError, LostError, MismatchError, StalenessError
from cluster.contracts.types import BroadcastStats, Group, GroupSummary, Prompt, StepStats
from cluster.controller import Evaluator, train
from cluster.rollouts.buffer import Buffer
from cluster.supervision.timesheet import Timesheet
from tests.fakes import InlineExecutor, ListedEvents, NumberedPrompts, group_summary, run_config
from tests.unit.cluster.simulated_time import simulated


class Scene:
    """A pool that finishes every group at once, a learner that counts."""

    def __init__(
        self,
        *,
        differs_by: float = 0.0,
        lost: tuple[int, ...] = (),
        age: int = 0,
        waits_for_nodes: bool = False,
        **sections: Any,
    ) -> None:
        self.config = run_config(num_steps=3, buffer={"groups_per_step": 2}, **sections)
        self.buffer = Buffer(groups_per_step=2)
        self.log = ListedEvents()
        self.version = 0
        self.learned: list[list[int]] = []
        self.again: list[int] = []
        self.saved: list[int] = []
        self.num_unwritten = 0
        """Steps that a save came before the writing of."""
        self._mismatch, self._lost, self._age = differs_by, set(lost), age
        self._waits_for_nodes = waits_for_nodes

    async def run(self, evaluator: Any = None) -> None:
        await train(
            self.config,
            rollouts=self,
            fleet=self,
            learner=self,
            buffer=self.buffer,
            weights=self,
            log=self.log,
            timesheet=Timesheet(lambda lines: None),
            evaluator=evaluator,
        )

    # rollouts and fleet

    @contextlib.asynccontextmanager
    async def generating(self, *, into: Buffer):
        task = asyncio.create_task(self._generate(into))
        yield
        task.cancel()

    async def _generate(self, buffer: Buffer) -> None:
        changed = asyncio.Event()
        buffer.subscribe(changed.set)
        while True:
            for index in buffer.start():
                self._add(index)
            changed.clear()
            await changed.wait()

    def _add(self, index: int) -> None:
        summary = group_summary(index, version=self.buffer.version - self._age, rewards=(1.0, 0.0))
        self.buffer.add(index, Group(pieces=(index,), summary=summary))

    def sample_again(self, indices: set[int]) -> None:
        self.again += sorted(indices)
        self._lost -= indices
        for index in indices:
            self._add(index)

    def waits_for_nodes(self) -> bool:
        return self._waits_for_nodes

    def describe(self) -> str:
        return "rollout-0 is in phase 'starting'"

    def drain_stats(self) -> dict[str, float]:
        return {}

    stats = drain_stats

    # learner

    async def update(self, groups: Any) -> StepStats:
        if self._lost & {index for index, _ in groups}:
            raise LostError("its node is gone")
        self.learned.append([index for index, _ in groups])
        self.version += 1
        metrics = {"mismatch/mean_abs_nats": self._mismatch}
        return StepStats(
            policy_version=self.version, metrics=metrics, num_trajectories=4, num_trained_tokens=8, seconds=1.0
        )

    async def lost(self, groups: Any) -> set[int]:
        return {index for index, _ in groups} & self._lost

    def is_save_due(self) -> bool:
        return self.version in (2, 3)

    async def save(self, metric: float | None) -> None:
        self.saved.append(self.version)
        self.num_unwritten += len(self.log.steps) - self.log.num_written_steps

    # weights

    async def broadcast(self, pool: Any) -> BroadcastStats:
        return BroadcastStats(
            policy_version=self.version, digest="d", size_bytes=1, seconds=0.0, publish_seconds=0.0, attestations=()
        )


async def test_every_step_consumes_its_groups_and_is_saved_when_that_is_due():
    scene = Scene()
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]] and scene.saved == [2, 3] and scene.num_unwritten == 0


class ScriptedEvaluator:
    async def run(self, rollouts: Any, *, version: int, log: Any) -> dict[str, float]:
        return {"eval/reward": float(version)}


async def test_a_step_and_its_evaluation_are_one_line():
    scene = Scene(evaluation={"every_steps": 2})
    await scene.run(ScriptedEvaluator())
    assert [version for version, _ in scene.log.steps] == [0, 1, 2, 3]
    evaluated = {version: numbers["eval/reward"] for version, numbers in scene.log.steps if "eval/reward" in numbers}
    assert evaluated == {0: 0.0, 2: 2.0, 3: 3.0}
    assert all("reward/mean" in numbers for version, numbers in scene.log.steps if version)


class ListedRollouts:
    """Finishes an evaluation's groups in the order given."""

    def __init__(self, *summaries: GroupSummary) -> None:
        self._summaries = list(summaries)

    async def evaluate(self, tickets: Any, *, stall_s: float) -> Any:
        assert stall_s == run_config().stall_s
        return SimpleNamespace(summaries=self._summaries, num_dropped=0)


async def test_an_evaluations_mean_is_the_same_bit_for_bit_in_whatever_order_its_groups_come():
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    groups = [group_summary(index, num_trajectories=1, rewards=(value,)) for index, value in enumerate((0.1, 0.2, 0.3))]
    evaluator = Evaluator(
        config=run_config(evaluation={"num_prompts": 3}),
        source=NumberedPrompts(),
        thread=InlineExecutor(),
    )
    means = {
        (await evaluator.run(ListedRollouts(*order), version=0, log=ListedEvents()))["eval/reward"]
        for order in (groups, groups[::-1])
    }
    assert means == {(0.1 + 0.2 + 0.3) / 3}


def test_evaluation_is_the_same_every_time_and_never_a_training_group():
    evaluator = Evaluator(config=run_config(evaluation={"num_prompts": 9}), source=NumberedPrompts(5))
    tickets = evaluator.tickets(0)
    assert tickets == evaluator.tickets(0) and [t.index for t in tickets] == [-1, -2, -3, -4, -5]


async def test_groups_that_went_with_a_node_are_sampled_again_and_trained_on_once():
    scene = Scene(lost=(3,))
    await scene.run()
    assert scene.again == [3]
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]
    assert [event["groups"] for event in scene.log.events if event["kind"] == "groups_lost"] == [[3]]


async def test_a_mismatch_beyond_its_limit_stops_the_run_and_names_the_trajectories():
    scene = Scene(differs_by=0.6)
    await scene.run()
    assert scene.log.kinds().count("mismatch_alarm") == 3
    scene = Scene(differs_by=1.5, mismatch={"stop_nats": 1.0})
    with pytest.raises(MismatchError, match=r"differ by 1.5 nats .* step 1, .* trajectories/step-000001\*\.arrow"):
        await scene.run()
    assert scene.learned == [[0, 1]] and scene.saved == []


class LateScene(Scene):
    """Nothing moves for two and a half times as long as is too long."""

    async def _generate(self, buffer: Buffer) -> None:
        await asyncio.sleep(2.5 * self.config.stall_s)
        await super()._generate(buffer)


@simulated
async def test_a_run_ends_when_nothing_moves_for_too_long_unless_it_waits_for_nodes():
    with pytest.raises(DeadlineError, match="nothing moved for"):
        await LateScene().run()
    scene = LateScene(waits_for_nodes=True)
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]


async def test_a_token_beyond_the_bound_is_never_trained_on():
    scene = Scene(age=1)
    with pytest.raises(StalenessError, match="group 0 has a token of policy version -1, the learner is at 0"):
        await scene.run()
    assert scene.learned == []


class SourcedPrompts(NumberedPrompts):
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"p{index}", text="", columns={"kind": ["easy", None, "hard"][index]})


async def test_an_evaluation_names_the_sources_that_its_prompts_name():
    evaluator = Evaluator(
        config=run_config(evaluation={"num_prompts": 3, "source_column": "kind", "success_at": 2.0}),
        source=SourcedPrompts(3),
        thread=InlineExecutor(),
    )
    groups = [group_summary(-1 - index, num_trajectories=1, rewards=(float(index),)) for index in range(3)]
    told = await evaluator.run(ListedRollouts(*groups), version=0, log=ListedEvents())
    by_source = {name: value for name, value in told.items() if name.count("/") == 2}
    assert by_source == {
        "eval/reward/easy": 0.0,
        "eval/reward/hard": 2.0,
        "eval/accuracy/easy": 0.0,
        "eval/accuracy/hard": 1.0,
    }

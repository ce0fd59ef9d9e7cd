"""The loop with everything around it scripted."""

import asyncio
import contextlib
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contracts.errors import DeadlineError, LostError, MismatchError, StalenessError, WeightsError
from cluster.contracts.types import BroadcastStats, Group, GroupSummary, Prompt, StepStats, sample_seed
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
        bound: int = 0,
        waits_for_nodes: bool = False,
        **sections: Any,
    ) -> None:
        self.config = run_config(num_steps=3, buffer={"groups_per_step": 2, "max_off_policy_steps": bound}, **sections)
        self.buffer = Buffer(groups_per_step=2, max_off_policy_steps=bound)
        self.log = ListedEvents()
        self.timesheet = Timesheet(lambda lines: None)
        self.version = 0
        self.learned: list[list[int]] = []
        self.again: list[int] = []
        self.saved: list[int] = []
        self.saved_with: list[float | None] = []
        self.rated: list[tuple[int, float]] = []
        self.num_unlogged = 0
        """Saves that came before the log of their step."""
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
            timesheet=self.timesheet,
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
        return {"rollout/num_workers": 1.0}

    def stats(self) -> dict[str, float]:
        return {}

    # learner

    async def update(self, groups: Any) -> StepStats:
        if self._lost & {index for index, _ in groups}:
            raise LostError("its node is gone")
        self.learned.append([index for index, _ in groups])
        self.version += 1
        metrics = {"mismatch/mean_abs_nats": self._mismatch}
        return StepStats(policy_version=self.version, metrics=metrics, num_trained_tokens=8, seconds=1.0)

    async def lost(self, groups: Any) -> set[int]:
        return {index for index, _ in groups} & self._lost

    def rate(self, metric: float) -> None:
        self.rated.append((self.version, metric))

    def is_save_due(self) -> bool:
        return self.version in (2, 3)

    async def save(self, metric: float | None) -> None:
        self.saved.append(self.version)
        self.saved_with.append(metric)
        self.num_unlogged += self.log.steps[-1][0] != self.version

    # weights

    async def begin_broadcast(self) -> BroadcastStats:
        digest, proofs = f"d{self.version}", (None, None)
        return BroadcastStats(
            policy_version=self.version, digest=digest, size_bytes=1, seconds=0.0, attestations=proofs
        )

    async def finish_broadcast(self, pool: Any, published: BroadcastStats) -> BroadcastStats:
        return published


async def test_every_step_consumes_its_groups_and_is_saved_when_that_is_due():
    scene = Scene()
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]] and scene.saved == [2, 3] and scene.num_unlogged == 0


class ScriptedEvaluator:
    async def run(self, rollouts: Any, *, version: int, log: Any) -> dict[str, float]:
        return {"eval/reward": float(version)}


async def test_a_step_and_its_evaluation_are_one_line():
    scene = Scene(evaluation={"every_steps": 2})
    await scene.run(ScriptedEvaluator())
    assert [version for version, _ in scene.log.steps] == [0, 1, 2, 3]
    evaluated = {version: numbers["eval/reward"] for version, numbers in scene.log.steps if "eval/reward" in numbers}
    assert evaluated == {0: 0.0, 2: 2.0, 3: 3.0} and scene.rated == [(2, 2.0), (3, 3.0)]
    assert scene.saved == [2, 3] and scene.saved_with == [2.0, 3.0]
    told = {"reward/mean", "rollout/num_workers", "buffer/num_ready"}
    assert all(told <= numbers.keys() for version, numbers in scene.log.steps if version)


async def test_a_run_that_goes_on_does_not_evaluate_what_it_goes_on_from():
    scene = Scene(evaluation={"every_steps": 2})
    scene.version, scene.buffer = 1, Buffer(groups_per_step=2, max_off_policy_steps=0, version=1, next_index=2)
    await scene.run(ScriptedEvaluator())
    assert scene.learned == [[2, 3], [4, 5]] and [version for version, _ in scene.log.steps] == [2, 3]


class ListedRollouts:
    """Finishes an evaluation's groups in the order given."""

    def __init__(self, *summaries: GroupSummary, stall_s: float = run_config().stall_s, num_dropped: int = 0) -> None:
        self._summaries, self._stall_s, self._num_dropped = list(summaries), stall_s, num_dropped

    async def evaluate(self, tickets: Any, *, stall_s: float) -> Any:
        assert stall_s == self._stall_s
        return SimpleNamespace(summaries=self._summaries, num_dropped=self._num_dropped)


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
    assert means == {0.6 / 3}, "the sum is exact"


@pytest.mark.parametrize(("environment", "error"), [("single_turn", 0.5), ("guess", 12**-0.5)])
async def test_rows_of_one_prompt_are_one_prompt_to_the_standard_error_unless_an_environment_plays_them(
    environment, error
):
    """Two prompts in two rows each. What an environment makes of the same words may be another task."""
    source = [
        Prompt(prompt_id=f"p{row}", messages=[{"role": "user", "content": words}]) for row, words in enumerate("abab")
    ]
    config = run_config(evaluation={"num_prompts": 4}, environment=environment)
    groups = [
        group_summary(-1 - row, num_trajectories=1, rewards=(value,)) for row, value in enumerate((1.0, 0.0, 1.0, 0.0))
    ]
    evaluator = Evaluator(config=config, source=source, thread=InlineExecutor())
    told = await evaluator.run(ListedRollouts(*groups, stall_s=config.stall_s), version=0, log=ListedEvents())
    assert told["eval/reward_stderr"] == pytest.approx(error) and told["eval/num_prompts"] == 4


def test_evaluation_is_the_same_every_time_and_never_a_training_group():
    held_out = {"num_prompts": 9, "num_samples": 4, "temperature": 0.5}
    evaluator = Evaluator(config=run_config(evaluation=held_out), source=NumberedPrompts(5))
    tickets = evaluator.tickets(0)
    assert tickets == evaluator.tickets(0) and [t.index for t in tickets] == [-1, -2, -3, -4, -5]
    assert {(ticket.num_trajectories, ticket.sampling.temperature) for ticket in tickets} == {(4, 0.5)}
    few = Evaluator(config=run_config(evaluation={"num_prompts": 2}), source=NumberedPrompts(5))
    assert len(few.tickets(0)) == 2


def test_no_held_out_prompt_has_the_seed_of_a_training_group():
    """Seen before: an environment that makes its task of the seed was evaluated on the tasks that the run trains on first."""
    config = run_config(evaluation={"num_prompts": 64})
    held_out = Evaluator(config=config, source=NumberedPrompts(64)).tickets(0)
    training = {sample_seed(config.seed, index) for index in range(10_000)}
    assert len({ticket.seed for ticket in held_out} - training) == 64


async def test_groups_that_went_with_a_node_are_sampled_again_and_trained_on_once():
    scene = Scene(lost=(3,))
    await scene.run()
    assert scene.again == [3]
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]
    assert [event["groups"] for event in scene.log.events if event["kind"] == "groups_lost"] == [[3]]


class Piece:
    """Of a group, as an object ref is: what it names stays in the object store for as long as it is held."""


async def test_a_steps_trajectories_are_let_go_before_the_next_ones_are_waited_for():
    """Seen before: those of the last step took room beside all that the buffer's budget allows."""
    scene, pieces, held = Scene(), list[weakref.ref[Piece]](), list[int]()

    def add(index: int) -> None:
        pieces.append(weakref.ref(piece := Piece()))
        scene.buffer.add(index, Group(pieces=(piece,), summary=group_summary(index, version=scene.buffer.version)))

    take = scene.buffer.take

    async def watched(*args: Any, **more: Any) -> Any:
        held.append(sum(ref() is not None for ref in pieces[: 2 * scene.version]))
        return await take(*args, **more)

    scene._add, scene.buffer.take = add, watched
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]] and held == [0, 0, 0]


async def test_a_mismatch_beyond_its_limit_stops_the_run_and_names_the_trajectories():
    scene = Scene(differs_by=0.6)
    await scene.run()
    assert scene.log.kinds().count("mismatch_alarm") == 3
    scene = Scene(differs_by=1.0, mismatch={"stop_nats": 1.0})
    await scene.run()
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
    with pytest.raises(DeadlineError, match=r"nothing moved for .*; rollout-0 is in phase 'starting'"):
        await LateScene().run()
    scene = LateScene(waits_for_nodes=True)
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]


async def test_a_token_beyond_the_bound_is_never_trained_on():
    scene = Scene(age=1)
    with pytest.raises(StalenessError, match="group 0 has a token of policy version -1, the learner is at 0"):
        await scene.run()
    assert scene.learned == []


class SlowScene(Scene):
    """Learning takes 10 s and publishing 1; workers load for `loading_s`."""

    def __init__(self, *, loading_s: float = 5.0, save_at: tuple[int, ...] = (), **more: Any) -> None:
        super().__init__(**more)
        self.loading_s = loading_s
        self.spans: list[tuple[str, float, float]] = []
        """What was done, from when to when."""
        self._save_at = save_at

    def told(self, what: str) -> list[tuple[float, float]]:
        return [(began, ended) for name, began, ended in self.spans if name == what]

    @contextlib.asynccontextmanager
    async def taking(self, what: str, seconds: float):
        now = asyncio.get_running_loop().time
        began = now()
        await asyncio.sleep(seconds)
        yield
        self.spans.append((what, began, now()))

    async def update(self, groups: Any) -> StepStats:
        async with self.taking("learn", 10.0):
            return await super().update(groups)

    async def begin_broadcast(self) -> BroadcastStats:
        async with self.taking("publish", 1.0):
            return await super().begin_broadcast()

    async def finish_broadcast(self, pool: Any, published: BroadcastStats) -> BroadcastStats:
        async with self.taking("load", self.loading_s):
            return await super().finish_broadcast(pool, published)

    def stats(self) -> dict[str, float]:
        return {"weights/canary_error": float(self.version)}

    def is_save_due(self) -> bool:
        return self.version in self._save_at

    async def save(self, metric: float | None) -> None:
        async with self.taking("save", 2.0):
            await super().save(metric)


@pytest.fixture
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop measures by its own clock, which a test simulates."""
    now = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("cluster.controller.time", now)


def told_of(scene: Scene, name: str) -> list[float]:
    """By step."""
    return [metrics[name] for _, metrics in scene.log.steps]


@simulated
async def test_a_step_learns_while_the_weights_of_the_one_before_it_travel(loop_clock):
    """In turns a step takes 10 + 1 + 5 s. Beside each other only learning and publishing take the learner's time."""
    scene = SlowScene()
    await scene.run()
    assert scene.told("learn") == [(0, 10), (16, 26), (32, 42)]
    assert told_of(scene, "time/step_s") == [16, 16, 16] and told_of(scene, "weights/learner_wait_s") == [6, 6, 6]

    scene = SlowScene(bound=1)
    start = asyncio.get_running_loop().time()
    await scene.run()
    shifted = {
        what: [(began - start, ended - start) for began, ended in scene.told(what)] for what in ("learn", "load")
    }
    assert shifted == {"learn": [(0, 10), (11, 21), (22, 32)], "load": [(11, 16), (22, 27), (33, 38)]}
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]
    assert told_of(scene, "time/step_s") == [11, 11, 11] and told_of(scene, "weights/learner_wait_s") == [1, 1, 1]


@simulated
async def test_a_step_that_lost_groups_began_before_it_lost_them(loop_clock):
    scene = SlowScene(lost=(3,))
    await scene.run()
    assert scene.again == [3] and told_of(scene, "time/step_s") == [16, 26, 16]


@simulated
async def test_a_steps_line_is_written_when_all_workers_serve_its_weights_and_only_then_further_groups_start():
    scene = SlowScene(bound=1)
    written: list[tuple[float, int, int]] = []
    pending: list[tuple[float, int, int]] = []
    write = scene.log.step

    def step(version: int, metrics: dict[str, float]) -> None:
        write(version, metrics)
        written.append((asyncio.get_running_loop().time(), version, scene.buffer.version))

    scene.log.step = step
    scene.log.pending = lambda version, metrics: pending.append(
        (asyncio.get_running_loop().time(), version, scene.buffer.version)
    )
    await scene.run()
    assert written == [(16, 1, 1), (27, 2, 2), (38, 3, 3)]
    assert pending == [(11, 1, 0), (22, 2, 1), (33, 3, 2)], "a save on the way back from a death logs it before its end"
    assert told_of(scene, "weights/canary_error") == [1, 2, 3]
    assert told_of(scene, "staleness/max") == [0, 1, 1], "the groups of step 3 started when version 1 was loaded"
    broadcasts = [event for event in scene.log.events if event["kind"] == "broadcast"]
    assert [(each["policy_version"], each["digest"]) for each in broadcasts] == [(1, "d1"), (2, "d2"), (3, "d3")]
    assert {each["num_workers"] for each in broadcasts} == {2}


@simulated
async def test_workers_load_one_version_after_another_and_the_learner_waits_where_they_are_slow(loop_clock):
    """The load of version 1, from 11 to 41, outlasts step 2, which ends at 21."""
    scene = SlowScene(bound=1, loading_s=30.0)
    await scene.run()
    assert scene.told("learn") == [(0, 10), (11, 21), (42, 52)]
    assert scene.told("publish") == [(10, 11), (41, 42), (72, 73)]
    assert scene.told("load") == [(11, 41), (42, 72), (73, 103)]
    assert told_of(scene, "weights/learner_wait_s") == [1, 21, 21]


@simulated
async def test_a_save_and_an_evaluation_wait_until_all_workers_serve_the_step():
    scene = SlowScene(bound=1, save_at=(1,), evaluation={"every_steps": 2})
    await scene.run(ScriptedEvaluator())
    assert scene.told("load") == [(11, 16), (29, 34), (45, 50)] and scene.told("save") == [(16, 18)]
    assert scene.told("learn") == [(0, 10), (18, 28), (34, 44)]
    assert scene.num_unlogged == 0
    evaluated = {version: numbers["eval/reward"] for version, numbers in scene.log.steps if "eval/reward" in numbers}
    assert evaluated == {0: 0.0, 2: 2.0, 3: 3.0}


@simulated
async def test_the_timesheet_tells_what_the_driver_did_for_each_step():
    class Late(SlowScene):
        async def _generate(self, buffer: Buffer) -> None:
            await asyncio.sleep(7.0)
            await super()._generate(buffer)

    class Slow(ScriptedEvaluator):
        async def run(self, rollouts: Any, *, version: int, log: Any) -> dict[str, float]:
            await asyncio.sleep(3.0)
            return await super().run(rollouts, version=version, log=log)

    scene, lines = Late(save_at=(2,), evaluation={"every_steps": 2}), list[Any]()
    scene.timesheet = Timesheet(lines.extend, now=asyncio.get_running_loop().time)
    await scene.run(Slow())
    told = [(told["cost/gpu_hours"], told["weights/canary_error"]) for version, told in scene.log.steps if version]
    assert scene.timesheet.asked.is_set() and told == [(0.0, 1.0), (0.0, 2.0), (0.0, 3.0)]
    scene.timesheet.close()
    assert [(line["phase"], line["step"], line["end"] - line["start"]) for line in lines] == [
        ("evaluation", 0, 3),
        ("waiting for rollouts", 1, 7),
        *(("learning", 1, 10), ("sending weights", 1, 6)),
        *(("learning", 2, 10), ("sending weights", 2, 6), ("evaluation", 2, 3), ("saving", 2, 2)),
        *(("learning", 3, 10), ("sending weights", 3, 6), ("evaluation", 3, 3)),
    ]


@simulated
async def test_a_broadcast_that_fails_beside_a_step_ends_the_run_at_once():
    class Refused(SlowScene):
        async def finish_broadcast(self, pool: Any, published: BroadcastStats) -> BroadcastStats:
            await super().finish_broadcast(pool, published)
            raise WeightsError("off by 3 nats")

    scene = Refused(bound=1)
    with pytest.raises(WeightsError, match="off by 3 nats"):
        await scene.run()
    assert asyncio.get_running_loop().time() == 16.0, "not when step 2 is learned, at second 21"
    assert scene.learned == [[0, 1]] and scene.log.steps == [] and scene.buffer.version == 0


@simulated
async def test_a_run_that_is_stopped_while_weights_travel_writes_the_line_of_their_step():
    """What stops it saves the step under way, and writes that line: a resumed run goes on after both."""
    scene = SlowScene(bound=1)
    running = asyncio.create_task(scene.run())
    await asyncio.sleep(13.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    ((version, metrics),) = scene.log.steps
    assert version == 1 and metrics["reward/mean"] == 0.5 and "weights/canary_error" not in metrics
    assert scene.buffer.version == 0 and "broadcast" not in scene.log.kinds()
    told = [(event["kind"], event["policy_version"], event["digest"]) for event in scene.log.events]
    assert scene.log.keeps_errors
    assert told == [("published", 1, "d1")], "a replay compares with it"


@simulated
async def test_weights_that_went_with_the_learner_reach_the_workers_as_those_of_the_step_that_it_learned_meanwhile():
    class Dying(SlowScene):
        async def finish_broadcast(self, pool: Any, published: BroadcastStats) -> BroadcastStats:
            """The learner dies when it has sent half of version 1, and is free again when step 2 is learned."""
            sent = await super().finish_broadcast(pool, published)
            if published.policy_version == 1:
                await asyncio.sleep(8.0)
                return replace(sent, policy_version=self.version, digest=f"d{self.version}")
            return sent

    scene = Dying(bound=1)
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]
    assert [version for version, _ in scene.log.steps] == [1, 2, 3]
    told = [(event["kind"], event["policy_version"], event["digest"]) for event in scene.log.events]
    assert told == [("published", 1, "d1"), *(("broadcast", version, f"d{version}") for version in (2, 2, 3))]


@simulated
async def test_a_step_whose_mismatch_stops_the_run_is_told_before_it_stops_and_no_step_is_learned_meanwhile():
    scene = SlowScene(bound=1, loading_s=30.0, differs_by=1.5, mismatch={"stop_nats": 1.0})
    with pytest.raises(MismatchError):
        await scene.run()
    assert scene.learned == [[0, 1]] and [version for version, _ in scene.log.steps] == [1]
    assert scene.log.kinds() == ["broadcast", "mismatch_alarm"]


@simulated
async def test_a_wait_for_groups_is_not_too_long_while_workers_load():
    class Standing(SlowScene):
        """Sampling stands still while the workers load."""

        def _add(self, index: int) -> None:
            if index < 2 or self.buffer.version:
                super()._add(index)
            else:
                waiting.append(index)

        async def finish_broadcast(self, pool: Any, published: BroadcastStats) -> BroadcastStats:
            sent = await super().finish_broadcast(pool, published)
            while waiting:
                super()._add(waiting.pop())
            return sent

    waiting: list[int] = []
    scene = Standing(bound=1)
    scene.loading_s = 2.5 * scene.config.stall_s
    await scene.run()
    assert scene.learned == [[0, 1], [2, 3], [4, 5]]


@simulated
async def test_a_wait_for_groups_is_too_long_once_workers_have_loaded():
    class Standing(SlowScene):
        """The groups of step 3 never finish."""

        def _add(self, index: int) -> None:
            if index < 4:
                super()._add(index)

    scene = Standing(bound=1)
    with pytest.raises(DeadlineError, match="nothing moved for"):
        await asyncio.wait_for(scene.run(), 10 * scene.config.stall_s)
    assert scene.learned == [[0, 1], [2, 3]] and [version for version, _ in scene.log.steps] == [1, 2]


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
    log = ListedEvents()
    told = await evaluator.run(ListedRollouts(*groups), version=2, log=log)
    assert (log.events[0]["policy_version"], log.events[0]["identity"]) == (2, evaluator.config.evaluation.identity)
    assert told["eval/accuracy"] == pytest.approx(1 / 3)
    by_source = {name: value for name, value in told.items() if name.count("/") == 2}
    assert by_source == {
        "eval/reward/easy": 0.0,
        "eval/reward/hard": 2.0,
        "eval/accuracy/easy": 0.0,
        "eval/accuracy/hard": 1.0,
    }


async def test_an_evaluation_counts_what_it_leaves_out():
    evaluator = Evaluator(
        config=run_config(evaluation={"num_prompts": 2, "num_samples": 2, "temperature": 1.0}),
        source=NumberedPrompts(2),
        num_too_long=4,
        thread=InlineExecutor(),
    )
    groups = [group_summary(-1, rewards=(1.0, None)), group_summary(-2, rewards=(0.5, None))]
    told = await evaluator.run(ListedRollouts(*groups, num_dropped=3), version=0, log=ListedEvents())
    assert (told["eval/num_failed"], told["eval/num_prompts"], told["eval/reward"]) == (2.0, 2.0, 0.75)
    assert (told["eval/num_dropped"], told["eval/num_too_long"], told["eval/pass_at_1"]) == (3.0, 4.0, 0.5)


class SavingScene(Scene):
    """Says of each save up to which version groups might start."""

    async def save(self, metric: float | None) -> None:
        await super().save(metric)
        self.begun.append(self.buffer.version)

    begun: list[int]


@pytest.mark.parametrize(("is_colocated", "begun"), [(True, [1, 2]), (False, [2, 3])])
async def test_no_group_starts_on_engines_that_sleep_while_the_learner_saves(is_colocated: bool, begun: list[int]):
    scene = SavingScene(rollout={"colocated": is_colocated})
    scene.begun = []
    await scene.run()
    assert scene.saved == [2, 3] and scene.begun == begun and scene.buffer.version == 3
    assert scene.learned == [[0, 1], [2, 3], [4, 5]] and scene.num_unlogged == 0

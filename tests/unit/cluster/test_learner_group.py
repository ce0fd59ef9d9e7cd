"""The learner dies, comes back, and has made every recorded step exactly once."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import (
    BroadcastError,
    CheckpointError,
    ClaimLostError,
    ConfigError,
    DataError,
    DeadlineError,
    FailureKind,
    LedgerError,
    LostError,
    NumericsError,
    StorageError,
    WorkerError,
)
from cluster.contracts.provenance import KEY, Provenance, unknown
from cluster.contracts.types import ActorKind, Group, GroupSummary, RankGroup, StepStats
from cluster.learner_group import LearnerGroup
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import RemoteActor
from cluster.saving import SavingRules
from cluster.sinks.jsonl import JsonLines, read_steps
from cluster.supervision.supervisor import SupervisedActor, Supervisor
from tests.fakes import ListedEvents, actor_spec, death, group_summary, run_config
from tests.object_store import s3


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_lost = False
        self.num_checks_left = sys.maxsize
        """Then it is lost."""

    def append_record(self, step: int, line: str) -> None:
        self.lines.append(line)

    def read_records(self, after: int = 0) -> list[str]:
        return self.lines[after:]

    def cut_records(self, number: int) -> None: ...

    def check_claim(self) -> None:
        self.num_checks_left -= 1
        if self.is_lost or self.num_checks_left < 0:
            raise ClaimLostError("taken over")


class ObjectRef(str):
    """Comes to the driver when it is awaited, unless it is `lost`."""

    lost: Exception | None = None

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        if self.lost:
            raise self.lost
        return self


class ScriptedRank(RemoteActor):
    """Learns by counting; `fail(method, version)` says what goes wrong instead."""

    def __init__(self, scene: "Scene", spec: Any) -> None:
        super().__init__(spec, None, 1, "node")
        self._scene = scene
        self._version = 0
        self._last_step: StepStats | None = None

    async def reserve_address(self) -> str:
        return "here:1"

    async def build(self, *, deadline_s: float, **more: Any) -> None:
        self._scene.fail("build", 0)
        self._scene.built.append((self.name, more))

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        await asyncio.sleep(0)
        self._scene.deadlines_s[method] = deadline_s
        if self._scene.turns is not None:
            self._scene.turns.note(method)
        try:
            self._scene.fail(method, self._version)
        except NumericsError:  # as a learner raises it: between two updates of a step
            self._last_step = None
            raise
        match method:
            case "restore_latest":
                self._version = min([self._scene.saved, *(newest for newest in args[1:] if newest is not None)])
                metric = self._scene.metrics.get(self._version)
                found = {"policy_version": self._version, "metric": metric, **self._scene.rated_by}
                return found if self._version else None
            case "last_step":
                return self._last_step
            case "formula":
                return {"text": "token_mean[ppo_clip(A = grpo)]"}
            case "describe":
                return {"layout": "shared", "loading": "streamed"}
            case "save":
                self._scene.saved = self._version
                self._scene.saves.append(self._version)
                self._scene.metrics[self._version] = args[1]["metric"]
                self._scene.extras.append(args[1])
            case "update":
                self._version += 1
                (step,) = args if isinstance(args[0], tuple) else (args,)  # as it was recorded, or as it was read
                self._scene.learned.append(step)
                self._last_step = StepStats(policy_version=self._version, metrics={}, num_trained_tokens=1, seconds=1.0)
                return self._last_step

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        if self._scene.turns is not None:
            self._scene.turns.note(method)
        self._scene.deadlines_s[method] = deadline_s
        self._scene.fail(method, self._version)
        ref = ObjectRef(f"{'weights' if method == 'publish' else method} {self._version}")
        if method == "learned":
            return [ref]
        if self.name != "learner-0":
            return []
        try:
            self._scene.fail(f"fetch {method}", self._version)
        except ObjectLostError as error:
            ref.lost = error
        bucket = ObjectRef("bucket")
        bucket.lost = AssertionError("fetched to the driver's node")
        return [bucket, ref]

    async def kill(self) -> None:
        self._scene.num_killed += 1


class ScriptedRecorder(ScriptedRank):
    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        match method:
            case "holds":
                if args[0] == "lost":
                    raise LostError("gone")
                return True
            case "record_learned":
                self._scene.fail(method, args[1])
                self._scene.kept[args[0]] = args[1:]
            case "forget_learned":
                self._scene.fail(method, 0)
                self._scene.kept.pop(args[0], None)
                self._scene.forgotten.append(args[0])
            case _:
                return [rewarded(0)]

    async def call_for_batches(self, method: str, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        assert method == "record"
        step, *pieces = args
        if "lost" in pieces:
            raise LostError("recorder, 'record': its node is gone")
        self._scene.recorded[f"step {step}"] = tuple(pieces)
        return [tuple(pieces)], (f"step {step}", "digest")

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        self._scene.fail(method, 0)
        return list(self._scene.recorded[args[0]])


def rewarded(step: int) -> GroupSummary:
    return group_summary(step, rewards=(10.0, 10.0))


class Scene:
    def __init__(
        self,
        *failures: tuple[str, int, Exception],
        num_ranks: int = 1,
        max_restarts: int = 8,
        read_only: int | None = None,
        journal: Lines | None = None,
        turns: Any = None,
        pass_rates: Callable[[int], dict[str, float]] | None = None,
        provenance: Callable[[int], Provenance] = unknown,
        written: Callable[..., Awaitable[None]] | None = None,
        **config: Any,
    ) -> None:
        self.turns = turns
        self.failures = list(failures)
        self.now_s = 0.0
        self.saved = 0
        self.rated_by: dict[str, str] = {}
        self.saves: list[int] = []
        self.metrics: dict[int, float | None] = {}
        """Of what is saved, by version."""
        self.extras: list[dict[str, Any]] = []
        """That saves were asked for with."""
        self.learned: list[tuple[Any, ...]] = []
        self.recorded: dict[str, tuple[Any, ...]] = {}
        self.kept: dict[str, tuple[Any, ...]] = {}
        """The record of learning, by the name of the trajectories."""
        self.forgotten: list[str] = []
        self.deadlines_s: dict[str, float] = {}
        """Of the last call of each method."""
        self.built: list[tuple[str, dict[str, Any]]] = []
        self.num_killed = 0
        self.has_node = asyncio.Event()
        self.has_node.set()
        self.events = ListedEvents()
        self.journal = journal or Lines()
        supervision = {"backoff_s": 0, "max_restarts": max_restarts}
        config = RunConfig.model_validate(
            {"model": {"path": "none"}, "prompts": "none", "supervision": supervision, **config}
        )
        supervisor = Supervisor(config.supervision, self.events)

        async def spawn(spec: Any) -> RemoteActor:
            self.fail("spawn", 0)
            await self.has_node.wait()
            return ScriptedRank(self, spec)

        async def recorder(spec: Any) -> RemoteActor:
            return ScriptedRecorder(self, spec)

        self.group = LearnerGroup(
            config=config,
            ranks=[actor_spec(f"learner-{rank}", ActorKind.LEARNER) for rank in range(num_ranks)],
            spawn=spawn,
            supervisor=supervisor,
            recorder=SupervisedActor(actor_spec("recorder", ActorKind.RECORDER), start=recorder, supervisor=supervisor),
            ledger=Ledger(self.journal, num_steps=read_only),
            checkpoints="there",
            saving=SavingRules(config, clock=lambda: self.now_s),
            written=written or self.events.written,
            pass_rates=pass_rates,
            provenance=provenance,
            turns=turns,
        )

    def fail(self, method: str, version: int) -> None:
        for failure in self.failures:
            if failure[:2] == (method, version):
                self.failures.remove(failure)
                raise failure[2]

    async def stopped(self) -> list[tuple[int, list[GroupSummary]]]:
        """Saves its progress, as when the run is stopped; what it told."""
        told: list[tuple[int, list[GroupSummary]]] = []
        await self.group.save_progress(lambda stats, summaries: told.append((stats.policy_version, summaries)))
        return told

    async def learn(self, num_steps: int) -> None:
        done = self.group.version
        for step in range(done, done + num_steps):
            await self.group.update([(step, Group(pieces=(f"group {step}",), summary=rewarded(step)))])


async def test_a_death_in_an_update_rolls_back_to_the_checkpoint_and_learns_the_record_again():
    scene = Scene(("update", 2, death("learner-0", "update")))
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    await scene.learn(0)
    for step in (1, 2):
        stats = await scene.group.update([(step, Group(pieces=(f"group {step}",), summary=rewarded(step)))])
        assert stats.policy_version == step + 1
    assert scene.group.version == 3
    assert scene.learned == [("group 0",), ("group 1",), ("group 1",), ("group 2",)]
    recovery = scene.events.events[-1]
    assert (recovery["kind"], recovery["rolled_back_to"], recovery["steps_learned_again"]) == ("recovery", 1, 2)


async def test_a_step_is_recorded_with_the_pass_rates_of_all_groups_up_to_its_last_one():
    scene = Scene(pass_rates=lambda end: {"p0": end / 10})
    await scene.group.start()
    await scene.group.update([(index, Group(pieces=("g",), summary=rewarded(index))) for index in (2, 4)])
    assert '"pass_rates":{"p0":0.5}' in scene.journal.lines[0]


# The record of learning


async def test_what_every_rank_learned_is_recorded_beside_the_steps_trajectories():
    scene = Scene(num_ranks=2)
    await scene.group.start()
    await scene.learn(2)
    assert scene.kept == {"step 1": (0, "learned 1", "learned 1"), "step 2": (1, "learned 2", "learned 2")}


async def test_nothing_is_asked_for_where_no_group_is_recorded():
    scene = Scene(("learned", 1, AssertionError("asked")), record={"learned_groups": 0})
    await scene.group.start()
    await scene.learn(1)
    assert scene.kept == {} and scene.group.version == 1


async def test_a_record_of_learning_that_cannot_be_written_is_an_event_and_the_run_goes_on():
    scene = Scene(("record_learned", 0, StorageError("learned/step-000001.arrow: No space left on device")))
    await scene.group.start()
    await scene.learn(2)
    assert list(scene.kept) == ["step 2"]
    told = [event for event in scene.events.events if event["kind"] == "learned_not_recorded"]
    assert [(event["policy_version"], event["reason"]) for event in told] == [
        (1, "learned/step-000001.arrow: No space left on device")
    ]


@pytest.mark.parametrize("method", ["publish", "pack"])
async def test_what_a_node_says_of_its_weights_and_takes_with_it_is_published_again(method):
    """Seen before: the run ended, with an error of Ray's."""
    scene = Scene((f"fetch {method}", 1, ObjectLostError("0", None, "")))
    await scene.group.start()
    await scene.learn(1)
    *_, manifest = await getattr(scene.group, method)()
    assert await manifest == manifest and scene.num_killed == 1


@pytest.mark.parametrize("learned_groups", [8, 0])
async def test_a_step_that_is_learned_again_loses_its_record_until_it_has_a_new_one(learned_groups: int):
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(
        ("record_learned", 1, StorageError("full")), journal=before.journal, record={"learned_groups": learned_groups}
    )
    scene.recorded, scene.kept = before.recorded, {"step 1": (0, "old"), "step 2": (1, "old")}
    await scene.group.start()
    await scene.group.restore()
    assert scene.forgotten == ["step 1", "step 2"]
    assert scene.kept == ({"step 1": (0, "learned 1")} if learned_groups else {})


async def test_a_replay_reads_the_record_of_its_last_step_from_the_ranks_and_touches_the_runs_in_nothing():
    """The checkpoint of that step is no start: what it learned would not be seen."""
    before = Scene()
    await before.group.start()
    await before.learn(3)
    scene = Scene(journal=before.journal, read_only=2)
    scene.recorded, scene.kept, scene.saved = before.recorded, {"step 2": (1, "the run's")}, 2
    await scene.group.start()
    await scene.group.restore()
    assert await scene.group.learned() == ["learned 2"] and scene.learned == [("group 1",)]
    assert scene.kept == {"step 2": (1, "the run's")} and scene.forgotten == []


async def test_a_driver_that_was_taken_for_dead_records_and_saves_nothing():
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    scene.journal.is_lost = True
    with pytest.raises(ClaimLostError):
        await scene.learn(1)
    with pytest.raises(ClaimLostError):
        await scene.group.save(None)
    assert list(scene.recorded) == ["step 1"] and scene.saves == []


async def test_a_driver_that_is_taken_for_dead_while_it_learns_leaves_the_records_of_learning_alone():
    scene = Scene()
    await scene.group.start()
    scene.journal.num_checks_left = 1
    with pytest.raises(ClaimLostError):
        await scene.learn(1)
    with pytest.raises(ClaimLostError):
        await scene.group.restore()
    assert scene.kept == {} and scene.forgotten == []


async def test_an_old_record_of_learning_that_cannot_be_removed_is_an_event_and_is_replaced():
    scene = Scene(("forget_learned", 0, StorageError("busy")), ("update", 0, death("learner-0", "update")))
    await scene.group.start()
    await scene.learn(1)
    assert scene.events.kinds() == ["learner_loaded", "failure", "learned_not_recorded", "recovery"]
    assert scene.kept == {"step 1": (0, "learned 1")}


async def test_what_the_ranks_chose_while_loading_is_said():
    scene = Scene(num_ranks=2)
    await scene.group.start()
    assert [event["message"] for event in scene.events.events] == ["learner: layout shared, loading streamed"]


async def test_its_mathematics_is_known_for_the_passport_though_a_rank_dies_after_the_start():
    scene = Scene(("formula", 0, death("learner-0", "formula")))
    await scene.group.start()
    assert scene.events.kinds() == ["failure", "learner_loaded"]
    await scene.group.stop()
    assert scene.group.formula == {"text": "token_mean[ppo_clip(A = grpo)]"}
    assert scene.group.chosen == {"layout": "shared", "loading": "streamed"}


async def test_deaths_while_it_starts_and_restores_are_healed():
    scene = Scene(
        ("spawn", 0, death("learner-0", "start")),
        ("build", 0, death("learner-0", "build")),
        ("restore_latest", 0, death("learner-0", "restore")),
    )
    await scene.group.start()
    assert await scene.group.restore() == []
    assert scene.events.kinds() == ["failure", "failure", "learner_loaded", "failure", "recovery"]


async def test_groups_of_selected_trajectories_are_known_as_such_when_they_are_learned_again():
    before = Scene()
    await before.group.start()
    await before.learn(1)
    for selects, run in (
        (False, {}),
        (True, {"algorithm": {"selection": "balanced"}, "rollout": {"extra_trajectories": 2}}),
    ):
        scene = Scene(journal=before.journal, **run)
        scene.recorded = before.recorded
        await scene.group.start()
        ((_, (summary,)),) = await scene.group.restore()
        assert summary.is_chosen is selects


async def test_a_learner_that_died_waits_for_a_node_without_spending_its_budget():
    late = DeadlineError("learner-0 did not finish 'start' within 60 s", actor="learner-0", stage="start")
    scene = Scene()
    await scene.group.start()
    scene.failures += [("update", 0, death("learner-0", "update")), *[("spawn", 0, late)] * 10]
    await scene.learn(1)
    assert scene.group.version == 1
    assert scene.events.kinds() == ["learner_loaded", "failure", *["worker_waits"] * 10, "recovery"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConfigError("model.path='/mnt/model' does not load", actor="learner-0", stage="build"), "error"),
        (DeadlineError("learner-0 did not finish 'build' within 60 s", actor="learner-0", stage="build"), "hang"),
    ],
)
async def test_a_machine_without_the_model_or_that_hangs_is_one_more_failure_of_a_learner_that_was_up(error, failure):
    scene = Scene()
    await scene.group.start()
    scene.failures += [("update", 0, death("learner-0", "update")), ("build", 0, error)]
    await scene.learn(1)
    assert scene.group.version == 1
    assert [event.get("failure") for event in scene.events.events[1:]] == ["death", failure, None]


async def test_a_rank_without_room_takes_no_other_ranks_room():
    """It waits with all others: one that is up would hold its seat."""
    scene = Scene(num_ranks=2)
    await scene.group.start()
    late = DeadlineError("learner-1 did not finish 'start' within 60 s", actor="learner-1", stage="start")
    scene.failures += [("update", 0, death("learner-0", "update")), ("spawn", 0, late)]
    await scene.learn(1)
    (waits,) = [event for event in scene.events.events if event["kind"] == "worker_waits"]
    assert waits["actor"] == "learner-1" and scene.num_killed == 2 + 1


async def test_a_full_disk_of_the_driver_is_no_failure_of_a_learner_that_starts_again():
    scene = Scene()
    await scene.group.start()
    full = StorageError("events.jsonl: No space left on device")
    scene.failures += [("update", 0, death("learner-0", "update")), ("spawn", 0, full)]
    with pytest.raises(StorageError, match="No space left"):
        await scene.learn(1)
    assert [event.get("failure") for event in scene.events.events[1:]] == ["death"]


async def test_a_recorder_that_is_lost_for_good_is_no_failure_of_the_learner():
    scene = Scene(max_restarts=1)
    await scene.group.start()
    scene.failures += [("update", 0, death("learner-0", "update")), *[("read", 0, death("recorder", "read"))] * 2]
    with pytest.raises(WorkerError, match="1 restarts of recorder"):
        await scene.learn(1)
    assert [event["actor"] for event in scene.events.events if event["kind"] == "failure"] == [
        "learner-0",
        "recorder",
        "recorder",
    ]


async def test_an_error_of_its_own_while_it_starts_is_not_tried_again():
    scene = Scene(("build", 0, WorkerError("learner-0 failed in 'build': KeyError: 'model'")))
    with pytest.raises(WorkerError, match="KeyError"):
        await scene.group.start()
    assert scene.events.kinds() == []


async def test_a_learner_that_dies_for_ever_spends_the_budget():
    scene = Scene(*[("update", 0, death("learner-0", "update"))] * 9, max_restarts=3)
    await scene.group.start()
    with pytest.raises(WorkerError, match="restart budget is spent: 3 restarts of the learner"):
        await scene.learn(1)
    assert scene.num_killed == 4


LATE = DeadlineError("learner-0 did not finish 'update' within 600 s", actor="learner-0", stage="update")
FULL_GPU = WorkerError("learner-0: the memory of its GPU is full", actor="learner-0", stage="update")


@pytest.fixture
def slow_failures(monkeypatch) -> Callable[[Scene], None]:
    """Lets 120 s pass before each failure of a scene: at most 6 of them are within the 600 s of `window_s`."""

    def slow_down(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + 120 * scene.num_killed)

    return slow_down


@pytest.mark.parametrize("error", [FULL_GPU, LATE], ids=["memory", "deadline"])
async def test_a_step_that_always_fails_spends_the_budget_however_slowly(error, slow_failures):
    """Seen before: never 8 restarts in 600 s, so the run restarted forever. The first step, learned again each time, is not new."""
    scene = Scene(*[("update", 1, error)] * 99)
    slow_failures(scene)
    await scene.group.start()
    await scene.learn(1)
    with pytest.raises(WorkerError, match="restart budget is spent: 8 restarts of the learner without a new step"):
        await scene.learn(1)
    assert (scene.num_killed, scene.learned) == (9, [("group 0",)] * 9)


async def test_a_failure_before_each_new_step_ends_no_run(slow_failures):
    scene = Scene(*[("update", version, FULL_GPU) for version in range(9) for _ in range(2)], max_restarts=6)
    slow_failures(scene)
    await scene.group.start()
    await scene.learn(9)
    assert (scene.num_killed, scene.group.version) == (18, 9)


async def test_a_death_while_publishing_publishes_the_same_version_again():
    scene = Scene(("publish", 1, death("learner-1", "publish")), num_ranks=2)
    await scene.group.start()
    await scene.learn(1)
    assert await scene.group.publish() == ["bucket", "weights 1"]
    assert scene.group.version == 1


GROUP = RankGroup(name="g", size=2, sender="s", address="here:1", backend="gloo", timeout_s=5.0, lasts=True, digest="d")


async def test_a_death_while_packing_packs_the_same_version_again():
    scene = Scene(("pack", 1, death("learner-0", "pack")))
    await scene.group.start()
    await scene.learn(1)
    assert await scene.group.pack() == ["bucket", "pack 1"]
    assert scene.num_killed == 1


async def test_weights_are_sent_while_the_ranks_learn_and_a_lost_member_or_rank_restarts_nobody():
    scene = Scene(("send", 1, BroadcastError("a worker is lost")), ("send", 1, death("learner-0", "send")))
    await scene.group.start()
    await scene.learn(1)
    async with scene.group._turn:  # as an update holds it
        for error in (BroadcastError, WorkerError):
            with pytest.raises(error):
                await scene.group.send(GROUP)
        await scene.group.send(GROUP)
    assert scene.num_killed == 0
    assert scene.deadlines_s["send"] > GROUP.timeout_s, "its own limit comes first, and names the group"


OUT_OF_MEMORY = WorkerError("learner-0 failed in 'send': OutOfMemoryError", actor="learner-0")


@pytest.mark.parametrize("method", ["pack", "publish"])
async def test_a_rank_that_lives_and_cannot_send_is_restarted_before_anything_is_published_again(method: str):
    """Seen before: it packed again what it had no memory to send, for ever, and nothing said so."""
    scene = Scene(*[("send", 1, OUT_OF_MEMORY)] * 2)
    await scene.group.start()
    await scene.learn(1)
    num_killed: list[int] = []
    for _ in range(2):
        with pytest.raises(WorkerError, match="OutOfMemoryError"):
            await scene.group.send(GROUP)
        for _ in range(2):
            await getattr(scene.group, method)()
        num_killed.append(scene.num_killed)
    assert num_killed == [0, 1] and scene.learned == [("group 0",), ("group 0",)]


async def test_a_rank_that_has_sent_again_is_not_restarted_for_what_it_could_not_send_before():
    scene = Scene(*[("send", 1, OUT_OF_MEMORY)] * 2)
    await scene.group.start()
    await scene.learn(1)
    with pytest.raises(WorkerError):
        await scene.group.send(GROUP)
    failure = scene.failures.pop()
    await scene.group.send(GROUP)
    scene.failures.append(failure)
    with pytest.raises(WorkerError):
        await scene.group.send(GROUP)
    await scene.group.pack()
    assert scene.num_killed == 0


async def test_a_rank_that_could_not_send_and_was_restarted_meanwhile_is_not_restarted_again():
    late = DeadlineError("learner-0 did not finish 'send' within 610 s", actor="learner-0")
    scene = Scene(*[("send", 1, late)] * 2)
    await scene.group.start()
    await scene.learn(1)
    for _ in range(2):
        with pytest.raises(DeadlineError):
            await scene.group.send(GROUP)
    scene.failures.append(("update", 1, death("learner-0", "update")))
    await scene.learn(1)
    await scene.group.pack()
    assert scene.num_killed == 1


async def test_ranks_that_are_not_there_have_nothing_to_send_and_nothing_to_give_up():
    scene = Scene(("give_up", 0, death("learner-0", "give_up")))
    with pytest.raises(LostError):
        await scene.group.send(GROUP)
    await scene.group.give_up(GROUP)
    await scene.group.start()
    await scene.group.give_up(GROUP)


async def test_a_death_while_saving_saves_again():
    scene = Scene(("save", 1, death("learner-0", "save")))
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    assert scene.saved == 1


async def test_a_replays_learner_that_dies_while_it_exports_learns_the_steps_again_and_exports():
    """Seen before: the replay ended, hours of learning with it."""
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(("export", 2, death("learner-0", "export")), journal=before.journal, read_only=2)
    scene.recorded = before.recorded
    await scene.group.start()
    await scene.group.restore()
    await scene.group.export("/out")
    assert scene.learned == [("group 0",), ("group 1",)] * 2 and scene.num_killed == 1


async def test_a_death_while_a_saved_step_gets_its_evaluation_saves_that_too():
    """Nothing is learned again: the checkpoint is there, without a rating."""
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    scene.failures.append(("save", 1, death("learner-0", "save")))
    await scene.group.save(0.5)
    assert scene.metrics[1] == 0.5 and scene.group.saved_metric == 0.5


async def test_a_full_disk_while_saving_is_an_event_and_the_run_goes_on():
    scene = Scene(("save", 2, CheckpointError("checkpoint was not saved: No space left on device")))
    await scene.group.start()
    await scene.learn(2)
    await scene.group.save(None)
    assert scene.events.kinds()[1:] == ["checkpoint_failed"] and scene.saved == 0


@pytest.mark.parametrize(
    ("checkpoint", "due"),
    [
        ({"every_steps": 2, "every_s": None}, [2, 4, 5]),
        ({"every_steps": None, "every_s": 600}, [2, 4, 5]),  # 600 and 1,200 s after the start
        ({"every_steps": 3, "every_s": 600}, [2, 3, 5]),  # step 4 comes 300 s after step 3's save
        ({"every_steps": None, "every_s": None}, [5]),
    ],
)
async def test_a_checkpoint_is_due_by_number_by_time_and_at_the_end(checkpoint, due):
    scene = Scene(num_steps=5, checkpoint=checkpoint)
    await scene.group.start()
    for _ in range(5):
        await scene.learn(1)
        scene.now_s += 300
        if scene.group.is_save_due():
            await scene.group.save(None)
    assert scene.saves == due
    told = [event["policy_version"] for event in scene.events.events if event["kind"] == "checkpoint"]
    assert told == due


async def test_by_default_every_twentieth_step_is_saved():
    scene = Scene(num_steps=100)
    await scene.group.start()
    for version, is_due in ((19, False), (20, True), (21, False), (40, True)):
        scene.group.version = version
        assert scene.group.is_save_due() is is_due, version


async def test_steps_learned_again_are_saved_on_the_way_so_that_a_second_death_learns_no_more_than_the_first():
    scene = Scene(num_steps=9, checkpoint={"every_steps": 2})
    await scene.group.start()
    await scene.learn(5)
    assert scene.saves == []
    scene.failures.append(("update", 5, death("learner-0", "update")))
    await scene.learn(1)
    assert scene.saves == [2, 4] and scene.group.is_save_due(), "the loop evaluates step 6 and saves it"
    await scene.group.save(None)
    scene.failures.append(("update", 6, death("learner-0", "update")))
    await scene.learn(1)
    assert scene.events.events[-1]["rolled_back_to"] == 6 and scene.events.events[-1]["steps_learned_again"] == 1


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_learner_that_dies_before_its_step_is_saved_leaves_the_save_to_those_who_evaluate_the_step(
    is_idle: bool,
):
    """Seen in review: the restored learner saved it unrated, and a save of what is saved writes nothing: the best checkpoint was pruned."""
    scene = Scene(num_steps=9, checkpoint={"every_steps": 2}, evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    dies = death("learner-0", "update")
    scene.failures += [] if is_idle else [("update", 1, dies)]
    await scene.learn(1)
    if is_idle:  # while step 2 is evaluated
        await scene.group.heal(scene.group.actors()[0], dies)
    assert scene.events.kinds()[-1] == "recovery" and scene.group.version == 2
    assert scene.saves == [] and scene.group.is_save_due()


async def test_a_save_has_a_deadline_of_its_own_and_one_that_is_late_says_which_setting_to_raise():
    """Seen in review: a save that was slower than a step's deadline rolled the run back, again and again."""
    late = DeadlineError("learner-1 did not finish 'finish_saving'", actor="learner-1", stage="finish_saving")
    scene = Scene(
        ("finish_saving", 1, late),
        num_ranks=2,
        learner={"timeout_s": 100},
        checkpoint={"every_steps": 1, "timeout_s": 900},
        weights={"timeout_s": 300},
    )
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    await scene.group.publish()
    assert {name: scene.deadlines_s[name] for name in ("update", "save", "finish_saving", "publish")} == {
        "update": 100,
        "save": 900,
        "finish_saving": 900,
        "publish": 300,
    }
    assert scene.saves == [1, 1] and scene.num_killed == 2, "each rank once"
    (failure,) = [event for event in scene.events.events if event["kind"] == "failure"]
    assert failure["actor"] == "learner-1" and failure["reason"].endswith("raise checkpoint.timeout_s=900")


async def test_a_save_that_a_death_broke_off_is_made_again_with_its_evaluation():
    """Seen in review: what was written again in the background's place was unrated, and pruned though it was the best."""
    scene = Scene(num_steps=9, checkpoint={"every_steps": 2}, evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(2)
    await scene.group.save(0.5)
    await scene.learn(1)
    scene.saved = 0  # it is still being written
    scene.failures.append(("finish_saving", 3, death("learner-0", "finish_saving")))
    await scene.group.save(0.25)
    saved = [event for event in scene.events.events if event["kind"] == "checkpoint"]
    assert [(event["policy_version"], event["metric"]) for event in saved] == [(2, 0.5), (2, 0.5), (3, 0.25)]


@pytest.mark.parametrize("checkpoint", [{"every_steps": 2}, {"every_steps": None, "every_s": 600}])
async def test_a_save_in_the_background_that_went_with_an_idle_rank_is_made_again_with_its_evaluation(
    checkpoint: dict[str, Any],
):
    scene = Scene(num_steps=9, checkpoint=checkpoint, evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(2)
    await scene.group.save(0.5)
    scene.saved = 0  # it is still being written
    await scene.group.heal(scene.group.actors()[0], death("learner-0", "progress"))
    assert scene.saves == [2, 2] and scene.metrics[2] == 0.5
    assert scene.group.saved_version == 2 and scene.group.saved_metric == 0.5


async def test_a_run_that_is_stopped_after_an_evaluation_saves_the_step_with_it():
    """Seen in review: a step that is evaluated and not due for a save was saved unrated, and evaluated once more when the run went on."""
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    scene.group.rate(0.5)
    await scene.stopped()
    assert scene.metrics[1] == 0.5
    await scene.learn(1)
    await scene.stopped()
    assert scene.metrics[2] is None


@pytest.mark.parametrize(("rated_by", "metric"), [("reward", None), ("evaluation of others", None), (None, 0.5)])
async def test_a_step_that_was_rated_otherwise_counts_as_not_yet_evaluated(rated_by, metric):
    """Its run was resumed with held-out prompts. Checkpoints of earlier versions do not say."""
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(0.5)
    scene.rated_by = {"rated_by": rated_by} if rated_by else {}
    await scene.group.restore()
    assert scene.group.saved_metric == metric


@pytest.mark.parametrize("metric", [None, 0.5])
async def test_a_checkpoint_says_after_a_restart_whether_it_was_evaluated(metric: float | None):
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(metric)
    assert scene.group.saved_metric == metric
    scene.group.saved_metric = 9.0
    await scene.group.restore()
    assert scene.group.saved_metric == metric


@pytest.mark.parametrize("num_steps", [3, 2])
async def test_the_last_recorded_step_is_saved_by_the_driver_that_learns_it_again(num_steps):
    """The run's last one waited for its evaluation, and a run that was stopped there learned all of them again."""
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(journal=before.journal, num_steps=num_steps, checkpoint={"every_steps": 1})
    scene.recorded = before.recorded
    await scene.group.start()
    await scene.group.restore()
    assert scene.saves == [1] and scene.group.owes_a_save()
    await scene.group.save(None)
    assert not scene.group.owes_a_save()


async def test_a_last_step_that_is_not_to_be_saved_owes_no_save():
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(journal=before.journal, checkpoint={"every_steps": 3})
    scene.recorded = before.recorded
    await scene.group.start()
    await scene.group.restore()
    assert not scene.group.owes_a_save()


async def test_a_save_that_fails_after_all_while_the_run_ends_is_an_event():
    scene = Scene(("finish_saving", 2, CheckpointError("the disk is full")))
    await scene.group.finish_saving()  # nothing runs yet
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    await scene.learn(1)
    await scene.group.finish_saving()
    assert scene.events.kinds()[-1] == "checkpoint_failed"


async def test_a_run_that_ends_with_no_save_under_way_asks_for_none():
    scene = Scene(("finish_saving", 1, CheckpointError("the disk is full")))
    await scene.group.start()
    await scene.learn(1)
    await scene.group.finish_saving()
    assert "checkpoint_failed" not in scene.events.kinds()


async def test_a_save_that_is_tried_again_has_the_evaluation_of_its_step():
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    scene.group.rate(0.5)
    await scene.group.save(None)
    assert scene.metrics[1] == 0.5


async def test_a_checkpoint_ahead_of_the_ledger_is_refused():
    """Seen in review: with a ledger that was copied in part the run was over at once, or ended after a step with an AssertionError."""
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(journal=before.journal)
    scene.saved = 5
    await scene.group.start()
    with pytest.raises(
        LedgerError,
        match=r"checkpoint is of step 5, and the ledger ends at step 2: .* model\.path=there/step-000005/model",
    ):
        await scene.group.restore()
    assert scene.learned == []


async def test_each_step_that_is_learned_again_is_told_before_it_is_saved():
    """Seen in review: after a death on the way the steps up to the new checkpoint were neither told nor returned."""
    before = Scene()
    await before.group.start()
    await before.learn(4)
    dies = death("learner-0", "update")
    scene = Scene(("update", 3, dies), journal=before.journal, checkpoint={"every_steps": 2})
    scene.recorded = before.recorded
    told: list[tuple[int, list[int]]] = []

    def tell(stats: StepStats, summaries: list[GroupSummary]) -> None:
        told.append((stats.policy_version, list(scene.saves)))

    await scene.group.start()
    returned = await scene.group.restore(tell)
    assert told == [(1, []), (2, []), (3, [2]), (3, [2]), (4, [2])]
    assert [stats.policy_version for stats, _ in returned] == [3, 4]
    scene.failures.append(("update", 4, dies))
    await scene.learn(1)
    assert len(told) == 5, "the run's log has these steps already"


async def test_the_version_stays_and_its_save_stays_due_while_a_dead_learner_is_restored():
    """Seen in simulation: the last evaluation ended meanwhile. It was told as version 0's, and the run ended without its last save."""
    scene = Scene(num_steps=3, checkpoint={"every_steps": 2})
    await scene.group.start()
    await scene.learn(2)
    await scene.group.save(None)
    await scene.learn(1)
    healing = asyncio.create_task(scene.group.heal(scene.group.actors()[0], death("learner-0", "progress")))
    seen: set[tuple[int, bool]] = set()
    while not healing.done():
        seen.add((scene.group.version, scene.group.is_save_due()))
        await asyncio.sleep(0)
    await healing
    assert seen == {(3, True)} and scene.group.saved_version == 2


async def test_an_evaluation_that_ends_while_a_dead_learner_is_restored_rates_its_step():
    scene = Scene(evaluation={"prompts": "file"})
    await scene.group.start()
    await scene.learn(1)
    healing = asyncio.create_task(scene.group.heal(scene.group.actors()[0], death("learner-0", "progress")))
    while "restore_latest" not in scene.deadlines_s:  # the new ranks are at version 0
        await asyncio.sleep(0)
    scene.group.rate(0.5)
    await healing
    await scene.stopped()
    assert scene.metrics[1] == 0.5


@pytest.mark.parametrize(("evaluation", "metric"), [({"prompts": "file"}, 0.9), ({}, 10.0)])
async def test_a_step_whose_save_was_lost_with_its_driver_is_saved_again_with_its_evaluation(evaluation, metric):
    """Seen in review: it was saved without a metric, and could not be kept as the best."""
    settings = {"num_steps": 9, "checkpoint": {"every_steps": 2}, "evaluation": evaluation}
    before = Scene(**settings)
    await before.group.start()
    await before.learn(3)
    made = Provenance(evaluations={2: {"eval/reward": 0.9}})
    after = Scene(journal=before.journal, provenance=lambda version: made, **settings)
    after.recorded = before.recorded
    await after.group.start()
    await after.group.restore()
    assert after.metrics == {2: metric}


async def test_a_checkpoint_without_an_evaluation_is_rated_by_the_groups_of_its_step():
    """Seen before: one that was saved while steps were learned again, or when the run was stopped, could not be kept as the best."""
    scene = Scene(("update", 2, death("learner-0", "update")), num_steps=9, checkpoint={"every_steps": 2})
    await scene.group.start()
    await scene.stopped()
    await scene.learn(3)
    await scene.stopped()
    await scene.learn(1)
    await scene.group.save(0.5)
    saved = [event for event in scene.events.events if event["kind"] == "checkpoint"]
    assert [(event["policy_version"], event["metric"]) for event in saved] == [(2, 10.0), (3, 10.0), (4, 0.5)]


@pytest.mark.parametrize(
    ("run", "metric"),
    [
        ({}, 10.0),
        ({"evaluation": {"prompts": "file"}}, None),
        ({"recorded": "there"}, None),
        ({"algorithm": {"selection": "balanced"}, "rollout": {"extra_trajectories": 2}}, None),
        ({"algorithm": {"filters": ["zero_variance"]}}, None),
        ({"prompts": {"name": "repeat", "text": "a", "difficulty": {}}}, None),
    ],
)
def test_a_steps_reward_rates_a_checkpoint_where_it_is_the_policys_own_and_nothing_is_evaluated(run, metric):
    assert SavingRules(run_config(**run)).metric_of([rewarded(0)]) == metric


def test_a_rating_says_what_it_is_of():
    """A resumed run may evaluate in another way."""

    def rated_by(**evaluation: Any) -> str:
        return SavingRules(run_config(evaluation=evaluation)).rated_by()

    evaluations: list[dict[str, Any]] = [
        {"prompts": "file"},
        {"prompts": {"name": "file", "path": "harder.jsonl"}},
        {"prompts": "file", "num_prompts": 64},
        {"prompts": "file", "temperature": 0.5},
    ]
    assert rated_by() == "reward" and len({rated_by(**each) for each in evaluations} - {"reward"}) == 4
    assert rated_by(prompts="file", every_steps=5, success_at=0.5) == rated_by(prompts="file")


async def test_a_checkpoint_is_saved_with_what_rates_it_and_what_made_it():
    scene = Scene(provenance=lambda version: Provenance(evaluations={version: {"eval/reward": 0.5}}))
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(0.5)
    assert scene.extras[-1]["rated_by"] == "reward"
    assert scene.extras[-1][KEY]["evaluations"] == {"1": {"eval/reward": 0.5}}


async def test_the_last_step_is_not_saved_while_it_is_learned_again_but_rated_first():
    scene = Scene(("update", 1, death("learner-0", "update")), num_steps=2, checkpoint={"every_steps": 1})
    await scene.group.start()
    await scene.learn(2)
    assert scene.saves == [1] and scene.group.is_save_due()


async def test_a_run_that_is_stopped_in_an_update_saves_the_step_that_the_update_makes():
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    under_way = asyncio.create_task(scene.learn(1))
    while len(scene.learned) < 2:  # the rank has made the step, its caller has not heard of it
        await asyncio.sleep(0)
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert scene.group.version == 1
    assert await scene.stopped() == [(2, [rewarded(1)])]
    assert scene.saves == [2] and scene.group.saved_version == 2 and list(scene.kept) == ["step 1", "step 2"]


async def test_a_run_that_is_stopped_in_its_restore_saves_the_step_that_it_has_learned_again():
    before = Scene()
    await before.group.start()
    await before.learn(3)
    scene = Scene(journal=before.journal)
    scene.recorded = before.recorded
    await scene.group.start()
    restoring = asyncio.create_task(scene.group.restore())
    while len(scene.learned) < 2:
        await asyncio.sleep(0)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    assert await scene.stopped() == [(2, [rewarded(0)])]
    assert scene.saves == [2] and scene.group.saved_version == 2


async def test_a_run_that_is_stopped_tells_its_last_step_also_without_a_record_of_learning():
    """Seen in review: the step was saved, and said to be not saved, and no line of metrics told of it."""
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    scene.failures.append(("learned", 1, death("learner-0", "learned")))
    assert await scene.stopped() == [(1, [rewarded(0)])]
    assert scene.saves == [1]
    assert scene.events.kinds()[-1] == "learned_not_recorded"


@pytest.mark.parametrize("method", ["save", "finish_saving"])
async def test_a_run_that_is_stopped_tells_its_last_step_before_its_checkpoint_may_stand(method: str):
    """Seen in review: the save outlasted `stop_timeout_s`, or a rank died in it. The checkpoint stood all the same, the run went on from
    there, and no line of metrics ever told of its step."""
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    scene.failures.append((method, 1, death("learner-0", method)))
    told: list[int] = []
    with pytest.raises(WorkerError):
        await scene.group.save_progress(lambda stats, summaries: told.append(stats.policy_version))
    assert told == [1]


async def test_after_a_step_that_failed_the_one_before_it_is_saved_and_not_told_again():
    scene = Scene(("update", 1, DataError("row 3 cannot be trained on")))
    await scene.group.start()
    await scene.learn(1)
    with pytest.raises(DataError):
        await scene.learn(1)
    assert await scene.stopped() == []
    assert scene.saves == [1] and scene.metrics[1] is None, "the failed step's rewards do not rate it"


@pytest.mark.parametrize("saves", [False, True])
async def test_a_run_that_is_stopped_in_the_step_that_ends_it_asks_no_ranks(saves: bool):
    scene = Scene(max_restarts=0)
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    scene.failures.append(("update", 1, death("learner-0", "update")))
    under_way = asyncio.create_task(scene.learn(1))
    while not scene.group._turn.locked():
        await asyncio.sleep(0)
    await (scene.stopped() if saves else scene.group.finish_saving())
    with pytest.raises(WorkerError, match="restart budget"):
        await under_way


async def test_nothing_is_saved_of_a_step_that_failed_between_its_updates_but_the_last_save_is_finished():
    scene = Scene(
        ("update", 1, NumericsError("loss or gradient was not finite")),
        ("finish_saving", 1, CheckpointError("checkpoint was not saved: No space left on device")),
    )
    await scene.group.start()
    await scene.learn(1)
    with pytest.raises(NumericsError):
        await scene.learn(1)
    assert await scene.stopped() == []
    assert scene.saves == [] and scene.events.kinds()[-1] == "checkpoint_failed"


async def test_a_version_that_is_saved_is_not_saved_again_when_the_run_is_stopped():
    scene = Scene()
    await scene.group.start()
    await scene.stopped()
    await scene.learn(1)
    await scene.group.save(None)
    await scene.stopped()
    assert scene.saves == [1] and scene.num_killed == 0
    await scene.group.stop()
    assert scene.num_killed == 1
    await scene.stopped()  # no rank is left


FULL = CheckpointError("checkpoint was not saved: No space left on device")


async def test_a_save_in_the_background_that_failed_is_made_again_when_the_run_is_stopped():
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    scene.failures.append(("finish_saving", 1, FULL))
    await scene.stopped()
    assert scene.saves == [1, 1] and scene.group.saved_version == 1
    scene.failures.append(("finish_saving", 1, FULL))
    await scene.group.finish_saving()
    assert scene.events.kinds()[-3:] == ["checkpoint", "checkpoint_failed", "checkpoint"], "it is on the disk already"


async def test_a_save_in_the_background_that_failed_does_not_fail_the_next_one_and_is_told_of_its_own_version():
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    await scene.learn(1)
    scene.failures.append(("finish_saving", 2, FULL))
    await scene.group.save(None)
    told = [(event["kind"], event["policy_version"]) for event in scene.events.events[-3:]]
    assert told == [("checkpoint", 1), ("checkpoint_failed", 1), ("checkpoint", 2)] and scene.group.saved_version == 2


async def test_a_checkpoint_that_is_not_written_when_the_run_is_stopped_is_an_event_and_counts_for_nothing():
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    scene.failures += [("finish_saving", 1, FULL), ("save", 1, FULL)]
    await scene.stopped()
    assert scene.events.kinds()[-2:] == ["checkpoint_failed"] * 2 and scene.group.saved_version == 0


async def test_lost_groups_are_named_and_nothing_is_recorded():
    scene = Scene()
    await scene.group.start()
    groups = [
        (index, Group(pieces=(name,), summary=group_summary(index))) for index, name in ((3, "here"), (4, "lost"))
    ]
    with pytest.raises(LostError):
        await scene.group.update(groups)
    assert await scene.group.lost(groups) == {4}
    assert scene.learned == [] and scene.recorded == {}


async def test_one_ranks_death_restarts_them_all():
    scene = Scene(("update", 0, death("learner-1", "update")), num_ranks=2)
    await scene.group.start()
    await scene.learn(1)
    assert scene.num_killed == 2 and scene.group.version == 1
    assert scene.built == [(name, {"rendezvous": "here:1"}) for name in ("learner-0", "learner-1")] * 2
    assert [event["actor"] for event in scene.events.events[1:]] == ["learner-1", "learner-1"]


async def test_a_death_that_a_call_has_healed_meanwhile_kills_no_new_rank():
    scene = Scene(("update", 0, death("learner-0", "update")))
    await scene.group.start()
    (rank,) = scene.group.actors()
    await scene.learn(1)
    await scene.group.heal(rank, death("learner-0", "progress"))
    assert scene.num_killed == 1


LOST = LostError("learner-0, 'update': its input was lost with the node or actor that held it", actor="learner-0")


@pytest.mark.parametrize("error", [LOST, LATE])
async def test_recorded_groups_that_go_with_a_node_before_they_are_learned_again_are_read_again(error):
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    scene.failures.append(("update", 0, error))
    ((stats, summaries),) = await scene.group.restore()
    assert (stats.policy_version, scene.group.version) == (1, 1) and summaries == [rewarded(0)]
    assert scene.learned == [("group 0",), ("group 0",)]


@pytest.mark.parametrize("error", [LOST, LATE])
async def test_a_step_whose_recorded_groups_are_lost_to_the_ranks_or_that_hangs_is_learned_from_the_record(error):
    """The caller would have the groups of a recorded step sampled again. The first time that they are read they are lost too."""
    scene = Scene(("update", 0, error), ("update", 0, LOST))
    await scene.group.start()
    await scene.learn(1)
    assert scene.learned == [("group 0",)] and scene.group.version == 1


async def test_the_rank_that_failed_is_the_errors_actor_whatever_its_message_says():
    """Seen before: the first rank whose name stood in the message was it."""
    error = WorkerError("learner-10 lost learner-3", kind=FailureKind.DEATH, actor="learner-10", stage="update")
    scene = Scene(("update", 0, error), num_ranks=11)
    await scene.group.start()
    await scene.learn(1)
    _, failure, recovery = scene.events.events
    assert (failure["actor"], failure["actor_pid"]) == (recovery["actor"], 1) == ("learner-10", 1)


async def test_a_rank_that_was_killed_for_its_silence_is_the_one_that_failed_whichever_rank_says_so():
    scene = Scene(("update", 0, death("learner-0", "update")), num_ranks=2)
    await scene.group.start()
    scene.group.actors()[1].is_hung = True
    await scene.learn(1)
    _, failure, recovery = scene.events.events
    assert (failure["actor"], failure["failure"], recovery["actor"]) == ("learner-1", "hang", "learner-1")


@pytest.mark.parametrize(
    ("is_saved", "failures", "start"),
    [
        (True, [], "model.path=there/step-0*1/model"),
        (False, [], "the same model.path"),
        (True, [("finish_saving", 1, FULL)], "the same model.path"),
    ],
)
async def test_updates_that_are_not_finite_say_how_to_go_on_and_not_what_a_resume_refuses(is_saved, failures, start):
    """Seen in review: "lower optimizer.learning_rate", which the same run_dir does not take."""
    scene = Scene(("update", 1, NumericsError("loss or gradient was not finite")))
    await scene.group.start()
    await scene.learn(1)
    if is_saved:
        await scene.group.save(None)
    scene.failures += failures
    says = rf"not finite; .* begin another run_dir with a lower optimizer.learning_rate and {start}$"
    with pytest.raises(NumericsError, match=says):
        await scene.learn(1)


async def test_a_step_that_cannot_be_learned_says_how_to_go_on_now_and_at_every_resume():
    """Seen before: it was recorded, so every resume died of `row 3 cannot be trained on`, and what was learned since the save was lost."""
    scene = Scene(("update", 2, DataError("row 3 cannot be trained on")))
    await scene.group.start()
    await scene.learn(2)
    says = r"step 3 is recorded and cannot be learned: row 3 .* another run_dir with model.path=there/step-0*2/model"
    with pytest.raises(DataError, match=says):
        await scene.learn(1)
    assert scene.saves == [2]
    scene.failures.append(("update", 2, DataError("row 3 cannot be trained on")))
    with pytest.raises(DataError, match=says):
        await scene.group.restore()
    scene = Scene(("update", 0, DataError("row 3 cannot be trained on")))
    await scene.group.start()
    with pytest.raises(DataError, match=r"another run_dir with the same model\.path"):
        await scene.learn(1)


async def test_a_replay_that_cannot_learn_its_last_step_saves_nothing_among_the_runs_checkpoints():
    before = Scene()
    await before.group.start()
    await before.learn(2)
    scene = Scene(("update", 1, DataError("row 3")), journal=before.journal, read_only=2)
    scene.recorded = before.recorded
    await scene.group.start()
    with pytest.raises(DataError):
        await scene.group.restore()
    assert scene.saves == []


async def test_a_run_that_is_stopped_while_its_learner_is_built_again_asks_the_ranks_nothing():
    """Seen before: `'NoneType' object has no attribute 'last_step'` in place of how the run goes on."""
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)

    class Stopped(BaseException):
        """As a cancel comes: in the middle of building."""

    scene.failures += [
        ("update", 1, death("learner-0", "update")),
        ("build", 0, Stopped()),
        ("last_step", 0, WorkerError("AttributeError: 'NoneType' object has no attribute 'last_step'")),
    ]
    with pytest.raises((Stopped, BaseExceptionGroup)):
        await scene.learn(1)
    assert await scene.stopped() == []
    with pytest.raises(LostError):
        await scene.group.send(GROUP)


async def test_a_run_that_is_stopped_while_a_dead_learner_waits_for_a_node_does_not_wait_for_it_too():
    """Seen before: Ctrl-C took all of `checkpoint.stop_timeout_s`, for ranks that had nothing to save."""
    scene = Scene()
    await scene.group.start()
    await scene.learn(1)
    await scene.group.save(None)
    scene.has_node.clear()
    (rank,) = scene.group.actors()
    healing = asyncio.create_task(scene.group.heal(rank, death("learner-0", "progress")))
    while not scene.num_killed:
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await scene.stopped() == []
        await scene.group.finish_saving()
    healing.cancel()


# A checkpoint and the log


class Written:
    """A log that is written when it is let. It notes the version of the newest checkpoint each time."""

    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.saved_before: list[int] = []
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def __call__(self, *, within_s: float | None) -> None:
        async with asyncio.timeout(within_s):
            await self.is_free.wait()
        assert self.scene is not None
        self.saved_before.append(self.scene.saved)


def logged(*failures: tuple[str, int, Exception], **more: Any) -> tuple[Scene, Written]:
    written = Written()
    scene = Scene(*failures, written=written, **more)
    written.scene = scene
    return scene, written


@pytest.mark.parametrize("way", ["asked for", "stopped", "on the way back", "before a step that cannot be learned"])
async def test_no_checkpoint_is_made_before_the_log_of_its_steps_is_written(way: str):
    """Seen in review: a stopped run, and one whose learner came back, saved steps whose lines waited in memory. SIGKILL then lost these
    lines for ever: a driver that resumes from the checkpoint does not log them again."""
    scene, written = logged(num_steps=9, checkpoint={"every_steps": 2})
    await scene.group.start()
    await scene.learn(2)
    match way:
        case "asked for":
            await scene.group.save(None)
        case "stopped":
            await scene.stopped()
        case "on the way back":
            scene.failures.append(("update", 2, death("learner-0", "update")))
            await scene.learn(1)
        case _:
            scene.failures.append(("update", 2, DataError("row 3 cannot be trained on")))
            with pytest.raises(DataError):
                await scene.learn(1)
    assert scene.saves == [2] and written.saved_before == [0]


async def test_each_step_that_is_learned_again_is_logged_before_the_log_is_written_for_its_checkpoint():
    before = Scene()
    await before.group.start()
    await before.learn(3)
    scene, written = logged(journal=before.journal, checkpoint={"every_steps": 2})
    scene.recorded = before.recorded
    told: list[tuple[int, int]] = []
    await scene.group.start()
    await scene.group.restore(lambda stats, _: told.append((stats.policy_version, len(written.saved_before))))
    assert told == [(1, 0), (2, 0), (3, 1)] and scene.saves == [2]


async def test_a_run_in_a_store_that_is_stopped_leaves_the_line_of_the_step_that_it_saves():
    with s3("bucket"):
        directory, found = RunDirectory("s3://bucket/stopped"), RunDirectory("s3://bucket/stopped")
        with MetricLog([JsonLines(directory)], directory=directory) as log:
            scene = Scene(written=log.written)
            await scene.group.start()
            await scene.learn(1)
            await scene.group.save_progress(lambda stats, _: log.step(stats.policy_version, {"loss": 0.5}), log_s=60.0)
            assert scene.saves == [1] and read_steps(found)[1]["loss"] == 0.5


async def test_a_step_that_a_dead_learner_saves_on_its_way_back_has_its_line_though_its_end_is_still_to_come(tmp_path):
    """Seen in review: the save came due by time while a slow worker still loaded the weights of that step."""
    directory = RunDirectory(str(tmp_path))
    with MetricLog([JsonLines(directory)], directory=directory) as log:
        scene = Scene(written=log.written, checkpoint={"every_steps": None, "every_s": 600})
        await scene.group.start()
        await scene.learn(1)
        log.pending(1, {"loss": 0.5})
        scene.now_s = 600.0
        scene.failures.append(("update", 1, death("learner-0", "update")))
        await scene.learn(1)
        assert scene.saves == [1] and read_steps(directory)[1]["loss"] == 0.5


async def test_a_log_that_hangs_does_not_keep_a_run_that_is_stopped_from_its_checkpoint():
    scene, written = logged()
    await scene.group.start()
    await scene.learn(1)
    written.is_free.clear()
    await scene.group.save_progress(lambda stats, summaries: None, log_s=0.01)
    assert scene.saves == [1] and written.saved_before == []
    (told,) = [event for event in scene.events.events if event["kind"] == "storage_failed"]
    assert told["reason"] == "the log was not written in 0.0 s" and "metrics.jsonl may lack" in told["message"]


async def test_a_save_of_a_run_that_goes_on_waits_for_the_log_as_long_as_it_takes():
    scene, written = logged()
    await scene.group.start()
    await scene.learn(1)
    written.is_free.clear()
    saving = asyncio.create_task(scene.group.save(None))
    while not scene.group._turn.locked():
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert scene.saves == []
    written.is_free.set()
    await saving
    assert scene.saves == [1]


# GPUs that are shared in turns


class Turns:
    """Writes down whose turn begins, and what the ranks do in theirs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_learners = True

    def note(self, method: str) -> None:
        if method in ("restore_latest", "update", "publish", "save", "rest"):
            assert self.is_learners, f"{method} while the engines have the GPUs"
            self.log.append(method)

    async def begin_learners(self, *, ends_with_broadcast: bool) -> None:
        if not self.is_learners:
            self.log.append("engines discard" if ends_with_broadcast else "engines keep")
        self.is_learners = True

    async def end_learners(self) -> None:
        self.is_learners = False
        self.log.append("engines")

    def drain(self) -> list[str]:
        drained, self.log = self.log, []
        return drained


async def resting(*failures: tuple[str, int, Exception], **more: Any) -> Scene:
    """At version 1, which was published."""
    scene = Scene(*failures, turns=Turns(), **more)
    await scene.group.start()
    await scene.group.restore()
    await scene.group.publish()
    await scene.learn(1)
    await scene.group.publish()
    assert scene.turns.drain() == [
        *("restore_latest", "publish", "rest", "engines"),
        *("engines discard", "update", "publish", "rest", "engines"),
    ]
    return scene


async def test_ranks_rest_from_publishing_until_the_next_step_and_while_nothing_is_saved():
    scene = await resting()
    await scene.group.save(None)
    assert scene.turns.drain() == ["engines keep", "save", "rest", "engines"]


async def test_what_is_published_again_for_a_worker_that_joins_leaves_the_others_their_weights():
    scene = await resting()
    await scene.group.publish()
    assert scene.turns.drain() == ["engines keep", "publish", "rest", "engines"]


async def test_a_step_that_lost_a_group_leaves_the_engines_awake_with_their_weights():
    scene = await resting()
    with pytest.raises(LostError):
        await scene.group.update([(1, Group(pieces=("lost",), summary=rewarded(1)))])
    assert scene.turns.drain() == [] and not scene.turns.is_learners


async def test_a_learner_that_dies_while_engines_sleep_is_restored_before_they_wake():
    scene = await resting(("update", 1, death("learner-0", "update")))
    await scene.learn(1)
    assert scene.turns.drain() == ["engines discard", "update", "restore_latest", "update", "update"]
    assert await scene.group.publish() == ["bucket", "weights 2"]
    assert scene.turns.drain() == ["publish", "rest", "engines"]


async def test_a_learner_that_dies_going_to_rest_publishes_again():
    scene = await resting()
    await scene.learn(1)
    scene.turns.drain()
    scene.failures.append(("rest", 2, death("learner-0", "rest")))
    assert await scene.group.publish() == ["bucket", "weights 2"]
    assert scene.turns.drain() == [
        *("publish", "rest", "restore_latest", "update", "update", "publish", "rest", "engines")
    ]


async def test_a_learner_that_dies_at_rest_is_restored_by_the_step_that_needs_it():
    scene = await resting()
    (rank,) = scene.group.actors()
    await scene.group.heal(rank, death("learner-0", "progress"))
    assert scene.turns.drain() == [] and scene.group.actors() == [rank], "engines sample"
    scene.failures.append(("update", 1, death("learner-0", "update")))
    await scene.learn(1)
    assert scene.group.version == 2 and scene.group.actors() != [rank]


async def test_a_learner_that_dies_at_rest_is_restored_in_its_turn_when_a_save_needs_it():
    scene = await resting(("finish_saving", 1, death("learner-0", "finish_saving")))
    await scene.group.save(None)
    assert scene.turns.drain() == ["engines keep", "restore_latest", "update", "save", "rest", "engines"]


async def test_a_rank_that_could_not_send_is_restarted_in_the_learners_turn():
    scene = await resting(*[("send", 1, OUT_OF_MEMORY)] * 2)
    for _ in range(2):
        with pytest.raises(WorkerError):
            await scene.group.send(GROUP)
    await scene.group.publish()
    assert scene.turns.drain() == ["engines keep", "restore_latest", "update", "publish", "rest", "engines"]


async def test_a_learner_that_dies_in_its_turn_is_healed_at_once():
    scene = Scene(turns=Turns())
    await scene.group.start()
    (rank,) = scene.group.actors()
    await scene.group.heal(rank, death("learner-0", "progress"))
    assert scene.group.actors() != [rank]


@pytest.mark.parametrize("is_published", [False, True])
async def test_a_run_that_is_stopped_saves_in_the_learners_turn(is_published: bool):
    """Also while engines sample: they stop."""
    scene = await resting()
    await scene.learn(1)
    if is_published:
        await scene.group.publish()
    scene.turns.drain()
    await scene.stopped()
    assert scene.saves == [2] and scene.turns.is_learners
    assert scene.turns.drain() == (["engines keep", "save"] if is_published else ["save"])

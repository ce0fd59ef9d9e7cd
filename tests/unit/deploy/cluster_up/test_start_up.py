"""What a run says before its actors start."""

import asyncio
import contextlib
import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contracts.config import RunConfig, SupervisionConfig
from cluster.contracts.errors import DeadlineError, PreemptedError, WeightsError
from cluster.contracts.types import ActorKind, StepStats
from cluster.record.run_directory import RunDirectory
from cluster.record.writer import Writer
from cluster.supervision.placement import ClusterResources, Node, plan
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from cluster.supervision.timesheet import Timesheet
from deploy.cluster_up import start_up
from deploy.cluster_up.stopping import saved_when_stopped
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import validated
from tests.fakes import ListedEvents, actor_spec, group_summary, run_config


@pytest.mark.parametrize(
    ("cpus_that_stay", "asked"), [(8.0, [[8.0]]), (0.0, [[0.0], [0.0, 16.0]])], ids=["have room", "have none"]
)
def test_a_run_is_placed_on_nodes_that_stay_unless_they_are_too_few(monkeypatch, cpus_that_stay, asked):
    """Seen before: a run that a leaving node preempted sized its seats with that node again, and waited for it in vain."""
    planned_on = []

    def planned(config, there, *, needs):
        planned_on.append([node.cpus for node in there.nodes])
        return plan(config, there, needs=needs)

    nodes = (Node(cpus=cpus_that_stay), Node(cpus=16.0, is_leaving=True))
    monkeypatch.setattr(start_up, "available", lambda elastic: ClusterResources(nodes=nodes))
    start_up.placement_of(run_config(learner={"cpus_per_rank": 6}), planned)
    assert planned_on == asked


async def test_the_passport_is_written_while_the_event_loop_goes_on(monkeypatch, tmp_path):
    """The disk may be slow, and workers come up meanwhile."""
    here, writing = threading.get_ident(), []

    class Learner:
        formula, chosen = {}, {}

        async def start(self): ...

        async def restore(self, tell): ...

        def owes_a_save(self):
            return False

    class Sent:
        policy_version, digest = 0, "d0"

    class Source:
        async def ready(self): ...

        async def publish(self):
            return Sent

    monkeypatch.setattr(start_up, "write_passport", lambda *args, **more: writing.append(threading.get_ident()))
    made = Cluster(
        production=None, learner=Learner(), recorder=Source(), weights=Source(), supervisor=None, timesheet=None
    )
    await start_up._learn_and_publish(
        run_config(), made, RunDirectory(str(tmp_path)), ListedEvents(), None, learner_up=asyncio.Event()
    )
    assert len(writing) == 1 and here not in writing


async def test_a_passport_that_an_earlier_driver_wrote_stays(monkeypatch, tmp_path):
    (tmp_path / "passport.json").write_text("{}")
    monkeypatch.setattr(start_up, "write_passport", lambda *args, **more: pytest.fail("written again"))
    learner = SimpleNamespace(formula={}, chosen={})
    await start_up.note_passport(RunDirectory(str(tmp_path)), None, learner, weights_digest="d1")


async def test_a_step_that_was_learned_again_is_logged_before_its_checkpoint(tmp_path):
    done = []

    class Learner:
        async def restore(self, tell):
            stats = StepStats(policy_version=4, metrics={}, num_trained_tokens=8, seconds=1.0)
            tell(stats, [group_summary(0, rewards=(1.0, 0.0))])

        def owes_a_save(self):
            return True

        async def save(self, metric):
            done.append(("saved", metric, [version for version, _ in log.steps]))

    log = ListedEvents()
    await start_up.restore(run_config(), RunDirectory(str(tmp_path)), Learner(), log)
    assert done == [("saved", None, [4])] and log.steps[0][1]["reward/mean"] == 0.5


def test_a_run_directory_that_stands_still_is_told_of_by_name(tmp_path):
    """Seen before: on a hung NFS the run stood still without a word, and each look at the directory would have hung too."""
    now, is_begun, answers = [0.0], threading.Event(), threading.Event()
    directory, log = RunDirectory(str(tmp_path / "run")), ListedEvents()
    directory.writer = Writer(clock=lambda: now[0])
    directory.claim("{}")
    directory.writer.put(lambda: is_begun.set() or answers.wait(60))
    assert is_begun.wait(60)
    for now[0] in (29.0, 31.0, 36.0):
        start_up._write_status(directory, [], log)
    answers.set()
    directory.release()
    (told,) = log.events
    assert told["kind"] == "storage_silent" and told["silent_s"] == 31.0
    assert told["message"].startswith(f"{tmp_path}/run has not answered for 31 s, and the run waits for it: bring")


class NoSeats(Exception):
    """Ends the start where Ray would begin."""


@pytest.mark.parametrize(
    ("cpus", "said"), [(2.0, ["fewer CPUs than asked for: actors share them"]), (8.0, [])], ids=["shared", "roomy"]
)
async def test_a_run_whose_actors_share_cpus_says_so(monkeypatch, cpus, said):
    @contextlib.asynccontextmanager
    async def seats(placement, *, start_s, events, reserved):
        raise NoSeats
        yield

    monkeypatch.setattr(start_up, "seats", seats)
    monkeypatch.setattr(start_up, "available", lambda elastic: ClusterResources(nodes=(Node(cpus=cpus),)))
    config = validated({"model": {"path": "some/model"}, "prompts": "file", "learner": {"cpus_per_rank": 2}})
    log = ListedEvents()
    with pytest.raises(NoSeats):
        async with start_up.cluster(config, None, None, log):
            pass
    assert [event["message"] for event in log.events] == said


class FrozenRank:
    """A learner rank that is up and answers nothing."""

    spec, name, pid, node_id = actor_spec("learner-0", ActorKind.LEARNER), "learner-0", 7, "learns"

    def __init__(self) -> None:
        self.is_hung, self.last_seen, self.silent_since, self.last_progress = False, 0.0, -math.inf, None
        self.is_killed = asyncio.Event()

    async def progress(self, *, deadline_s: float) -> None:
        raise DeadlineError("learner-0 does not answer", actor=self.name)

    async def kill(self) -> None:
        self.is_killed.set()

    def drain_phases(self) -> list[Any]:
        return []


class Restoring:
    """A learner whose restore hangs with its rank. It notes how it ends."""

    formula, chosen, version = {}, {}, 2

    def __init__(self) -> None:
        self.ranks: list[FrozenRank] = []
        self.is_restoring = asyncio.Event()
        self.ended: list[str] = []

    async def start(self) -> None:
        self.ranks = [FrozenRank()]

    async def restore(self, tell: Any) -> None:
        self.is_restoring.set()
        await self.ranks[0].is_killed.wait()

    def owes_a_save(self) -> bool:
        return False

    async def heal(self, rank: FrozenRank, error: Exception) -> None: ...

    def actors(self) -> list[FrozenRank]:
        return self.ranks

    async def save_progress(self, tell: Any, *, log_s: float) -> None:
        self.ended.append("saved")

    async def stop(self) -> None:
        self.ended.append("ranks killed")


class Recorder:
    actor = None

    async def ready(self) -> None: ...

    async def stop(self) -> None: ...

    def progress(self) -> None: ...


class Workers:
    """A production. If it has an `error`, a worker that joins fails with it while the learner is restored."""

    error: Exception | None = None

    def __init__(self, learner: Restoring) -> None:
        self._learner = learner
        self.tasks: asyncio.TaskGroup | None = None

    async def start(self, *, reference_waits_for: asyncio.Event | None) -> None:
        if self.error is not None:
            self.tasks.create_task(self._fail())

    async def _fail(self) -> None:
        await self._learner.is_restoring.wait()
        raise self.error

    def places(self) -> list[Any]:
        return []

    def pool_of(self, kind: ActorKind) -> None: ...

    def note_progress(self) -> None: ...

    def run(self, tasks: asyncio.TaskGroup) -> None: ...

    async def stop(self) -> None: ...


class Sent:
    policy_version, digest = 2, "d2"


class Started:
    """A start, with all that it does elsewhere."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.log, self.learner = ListedEvents(), Restoring()
        self.workers, self._run_dir = Workers(self.learner), run_dir
        self.draining: dict[str, float | None] = {}
        self.waits_for_nodes = False
        self.waits = asyncio.Event()
        self.hang_s = 1e6

    @contextlib.asynccontextmanager
    async def seats(self, placement, *, start_s, events, reserved):
        if self.waits_for_nodes:
            self.waits.set()
            await asyncio.Event().wait()
        async with background():  # as the real ones have
            yield None

    async def publish(self) -> type[Sent]:
        return Sent

    async def draining_nodes(self) -> dict[str, float | None]:
        return self.draining

    def wire(self, config: RunConfig, *, tasks: asyncio.TaskGroup, **more: Any) -> Cluster:
        self.workers.tasks = tasks
        supervision = SupervisionConfig(heartbeat_s=0.001, hang_s=self.hang_s)
        return Cluster(
            production=self.workers,
            learner=self.learner,
            recorder=Recorder(),
            weights=self,
            supervisor=Supervisor(supervision, self.log),
            timesheet=Timesheet(lambda lines: None),
        )

    async def run(self, *, recorded_steps: int = 2) -> None:
        """Ends when all is up."""
        config = validated({"model": {"path": "some/model"}, "prompts": "file"})
        saved = partial(saved_when_stopped, interrupted=asyncio.Event(), timeout_s=60, log=self.log)
        ledger = SimpleNamespace(version=recorded_steps)
        async with asyncio.timeout(120), start_up.cluster(config, self._run_dir, ledger, self.log, saved=saved):
            pass


@pytest.fixture
def start(monkeypatch, tmp_path) -> Started:
    (tmp_path / "passport.json").write_text("{}")
    made = Started(RunDirectory(str(tmp_path)))
    monkeypatch.setattr(start_up, "seats", made.seats)
    monkeypatch.setattr(start_up, "wire", made.wire)
    monkeypatch.setattr(start_up, "ActorSpecs", lambda *args: None)
    monkeypatch.setattr(start_up, "available", lambda elastic: ClusterResources(nodes=(Node(cpus=8.0),)))
    monkeypatch.setattr("deploy.cluster_up.notices._LOOK_S", 0.0)
    monkeypatch.setattr("deploy.cluster_up.notices.draining_nodes", made.draining_nodes)
    monkeypatch.setattr("deploy.cluster_up.notices.drivers_node", lambda: "drives")
    return made


@pytest.mark.parametrize(
    ("recorded_steps", "ended"), [(2, ["saved", "ranks killed"]), (0, ["ranks killed"])], ids=["resumed", "new"]
)
async def test_a_resume_that_is_stopped_saves_the_steps_that_it_has_learned_again(start, recorded_steps, ended):
    """Seen in review: SIGTERM in the restore killed the ranks at once. A run without a recorded step has nothing to save."""
    running = asyncio.create_task(start.run(recorded_steps=recorded_steps))
    await start.learner.is_restoring.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert start.learner.ended == ended


async def test_a_resume_whose_worker_refuses_the_weights_saves_the_steps_that_it_has_learned_again(start):
    start.workers.error = WeightsError("rollout-0: digest d1, not d2")
    with pytest.raises(WeightsError, match="digest d1, not d2"):
        await start.run()
    assert start.learner.ended == ["saved", "ranks killed"]


@pytest.mark.parametrize("node_id", ["learns", "drives"])
async def test_a_resume_whose_node_goes_away_saves_and_ends_as_preempted(start, node_id):
    """Seen in review: steering heard of it only when all actors were up, and the node ended with the run."""
    running = asyncio.create_task(start.run())
    await start.learner.is_restoring.wait()
    start.draining = {node_id: None}
    with pytest.raises(PreemptedError, match=f"node {node_id} goes away"):
        await running
    assert start.learner.ended == ["saved", "ranks killed"]
    assert start.log.kinds() == ["starting", "preempted", "stopping"]


async def test_a_run_that_waits_for_nodes_ends_as_preempted_when_the_drivers_own_goes_away(start):
    start.waits_for_nodes = True
    running = asyncio.create_task(start.run())
    await start.waits.wait()
    start.draining = {"drives": None}
    with pytest.raises(PreemptedError, match="the driver's node drives goes away"):
        await running
    assert start.log.kinds() == ["preempted"]


async def test_a_rank_that_is_frozen_in_the_restore_is_found_by_its_silence(start):
    """Seen in review: only the deadline of the restore found it, after two hours. The restore goes on when the rank is killed."""
    start.hang_s = 0.01
    await start.run()
    assert start.log.kinds() == ["starting", "hang", "published", "started"]

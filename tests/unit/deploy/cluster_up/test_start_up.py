"""What a run says before its actors start."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from cluster.contracts.types import StepStats
from cluster.record.run_directory import RunDirectory
from cluster.record.writer import Writer
from cluster.supervision.placement import ClusterResources, Node
from deploy.cluster_up import start_up
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import validated
from tests.fakes import ListedEvents, group_summary


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
        None, made, RunDirectory(str(tmp_path)), ListedEvents(), learner_up=asyncio.Event()
    )
    assert len(writing) == 1 and here not in writing


async def test_a_passport_that_an_earlier_driver_wrote_stays(monkeypatch, tmp_path):
    (tmp_path / "passport.json").write_text("{}")
    monkeypatch.setattr(start_up, "write_passport", lambda *args, **more: pytest.fail("written again"))
    learner = SimpleNamespace(formula={}, chosen={})
    await start_up.note_passport(RunDirectory(str(tmp_path)), None, learner, weights_digest="d1")


async def test_a_step_that_was_learned_again_is_logged_before_its_checkpoint():
    done = []

    class Learner:
        async def restore(self, tell):
            stats = StepStats(policy_version=4, metrics={}, num_trajectories=2, num_trained_tokens=8, seconds=1.0)
            tell(stats, [group_summary(0, rewards=(1.0, 0.0))])

        def owes_a_save(self):
            return True

        async def save(self, metric):
            done.append(("saved", metric, [version for version, _ in log.steps]))

    log = ListedEvents()
    await start_up.restore(Learner(), log)
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

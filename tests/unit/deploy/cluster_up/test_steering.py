"""`treadwheel scale` says no where the driver would not obey, and a driver reads an order once."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import RemoteActor
from cluster.supervision.supervisor import Supervisor
from deploy.cluster_up.steering import CONTROL, Steering, scale
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import resolved_yaml, validated
from tests.fakes import ListedEvents, actor_spec


def claimed(path, **settings) -> RunDirectory:
    """A run directory with a living driver: this process."""
    directory = RunDirectory(str(path))
    directory.claim(resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", **settings})))
    return directory


def test_an_order_is_left_for_the_driver(tmp_path):
    directory = claimed(tmp_path)
    scale(directory, actors="rollout_workers", number=4)
    assert directory.read_text(CONTROL) == '{\n  "rollout_workers": 4\n}\n'


@pytest.mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({}, "rollout_workers=0", "rollout_workers=0: a run needs at least 1; ask for 1 or more"),
        ({}, "reward_services=0", "reward_services=0: a run needs at least 1; ask for 1 or more"),
        (
            {"recorded": "runs/other"},
            "rollout_workers=2",
            "learns from recorded='runs/other', samples and judges nothing",
        ),
        ({"recorded": "runs/other"}, "reward_services=2", "only a run of `treadwheel train` has .* reward services"),
        ({"deterministic": True}, "rollout_workers=2", "which worker samples what is fixed; start a run of its own"),
        (
            {"elastic": {"max_workers": 3}},
            "rollout_workers=4",
            "rollout_workers=4 is outside .* elastic.max_workers=3; ask for a number between",
        ),
    ],
)
def test_what_the_driver_would_not_do_is_refused(settings, asked, reason, tmp_path):
    directory = claimed(tmp_path, **settings)
    actors, number = asked.split("=")
    with pytest.raises(ConfigError, match=reason):
        scale(directory, actors=actors, number=int(number))
    assert not directory.exists(CONTROL)


def test_an_order_that_waits_for_the_driver_is_kept_beside_the_next_one_and_replaced_by_one_of_its_kind(tmp_path):
    """The bounds of `elastic` are of rollout workers."""
    directory = claimed(tmp_path, elastic={"max_workers": 3})
    for actors, number in (("rollout_workers", 2), ("reward_services", 4), ("rollout_workers", 3)):
        scale(directory, actors=actors, number=number)
    assert json.loads(directory.read_text(CONTROL)) == {"rollout_workers": 3, "reward_services": 4}


def test_a_run_without_a_driver_is_not_steered(tmp_path):
    claimed(tmp_path).release()
    with pytest.raises(ConfigError, match="has no living driver; set rollout"):
        scale(RunDirectory(str(tmp_path)), actors="rollout_workers", number=4)


class ScriptedFleet:
    """Notes what it is told."""

    def __init__(self, *nodes: str) -> None:
        self._workers = [RemoteActor(actor_spec(f"rollout-{i}"), None, i, node) for i, node in enumerate(nodes)]
        self.num_wanted = len(nodes)
        self.num_coming = 0
        self.told: list[tuple[str, object]] = []
        self.was_told = asyncio.Event()

    def workers(self) -> list[RemoteActor]:
        return self._workers

    def drain(self, name: str) -> None:
        self.told.append(("drain", name))
        self.was_told.set()

    def want(self, num_workers: int) -> None:
        self.num_wanted = num_workers
        self.told.append(("want", num_workers))
        self.was_told.set()


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet("stays", "leaves")


@pytest.fixture
def services() -> ScriptedFleet:
    return ScriptedFleet("stays")


@pytest.fixture
def deterministic() -> bool:
    return False


@pytest.fixture
def steering(tmp_path, fleet, services, deterministic, monkeypatch):
    """Of a run with two workers and a reward service, that looks as often as it can."""
    monkeypatch.setattr("deploy.cluster_up.steering._POLL_S", 0.0)
    monkeypatch.setattr("deploy.cluster_up.steering._CLUSTER_POLL_S", 0.0)
    config = validated(
        {"model": {"path": "m"}, "prompts": "file", "rollout": {"num_workers": 2}, "deterministic": deterministic}
    )
    events = ListedEvents()
    supervisor = Supervisor(config.supervision, events)
    cluster = Cluster(
        production=SimpleNamespace(fleet=fleet, services=services),
        learner=None,
        recorder=None,
        weights=None,
        supervisor=supervisor,
    )
    events.add = lambda sink: None
    return Steering(config, cluster=cluster, run_dir=RunDirectory(str(tmp_path)), log=events)


def announce(monkeypatch, *nodes: str) -> None:
    async def draining() -> set[str]:
        return set(nodes)

    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)


async def test_an_order_is_obeyed_and_an_unreadable_one_is_an_event(steering, fleet, tmp_path, monkeypatch):
    announce(monkeypatch)
    directory = RunDirectory(str(tmp_path))
    async with asyncio.timeout(10), steering.steering():
        directory.write_file(CONTROL, b'{"rollout_workers": "many"}')
        while not steering._log.events:
            await asyncio.sleep(0)
        directory.write_json(CONTROL, {"rollout_workers": 5})
        await fleet.was_told.wait()
    assert fleet.told == [("want", 5)] and not directory.exists(CONTROL)
    assert [event["kind"] for event in steering._log.events] == ["steering_failed", "scale"]
    assert "is not an order; use `treadwheel scale" in steering._log.events[0]["reason"]


@pytest.mark.parametrize("deterministic", [True])
async def test_a_deterministic_run_changes_its_reward_services_and_never_its_workers(
    steering, fleet, services, tmp_path
):
    """The second order is written by hand."""
    directory = RunDirectory(str(tmp_path))
    async with asyncio.timeout(10), steering.steering():
        directory.write_json(CONTROL, {"reward_services": 3})
        await services.was_told.wait()
        directory.write_json(CONTROL, {"rollout_workers": 5})
        while len(steering._log.events) < 2:
            await asyncio.sleep(0)
    assert services.told == [("want", 3)] and not fleet.told
    scaled, refused = steering._log.events
    assert (scaled["actors"], scaled["before"], scaled["num_workers"]) == ("reward_services", 1, 3)
    assert "which worker samples what is fixed" in refused["reason"]


async def test_an_order_that_came_while_the_run_started_is_obeyed(steering, fleet, tmp_path, monkeypatch):
    announce(monkeypatch)
    RunDirectory(str(tmp_path)).write_json(CONTROL, {"rollout_workers": 5})
    async with asyncio.timeout(10), steering.steering():
        await fleet.was_told.wait()
    assert fleet.told == [("want", 5)]


async def test_a_worker_on_a_leaving_node_is_drained_once_and_another_one_starts(steering, fleet, monkeypatch):
    announce(monkeypatch, "leaves")
    async with asyncio.timeout(10), steering.steering():
        await fleet.was_told.wait()
        for _ in range(10):
            await asyncio.sleep(0)
    assert fleet.told == [("drain", "rollout-1")]
    (event,) = steering._log.events
    assert (event["actor"], event["failure"], event["decision"]) == ("rollout-1", "termination", "drain")


async def test_a_node_that_stays_after_all_is_forgotten_and_may_announce_its_end_again(steering, fleet, monkeypatch):
    looks = iter([{"leaves"}, set(), {"leaves"}])

    async def draining() -> set[str]:
        return next(looks, {"leaves"})

    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)
    async with asyncio.timeout(10), steering.steering():
        while len(fleet.told) < 2:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
    assert fleet.told == [("drain", "rollout-1")] * 2


def test_the_loads_of_a_long_run_are_those_that_the_rule_looks_at(steering):
    """`elastic.scale_down_full_steps` is 10."""
    for version in range(1000):
        steering.step(version, {"time/step_s": 1.0, "buffer/learner_wait_s": float(version), "buffer/num_ready": 0.0})
    assert [load.wait_seconds for load in steering._loads] == [float(version) for version in range(990, 1000)]

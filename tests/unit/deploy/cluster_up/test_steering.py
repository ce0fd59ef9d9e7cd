"""`treadwheel scale` says no where the driver would not obey, and a driver reads an order once."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from cluster.contracts.config import RolloutConfig
from cluster.contracts.errors import ClaimLostError, ConfigError, PreemptedError, StorageError
from cluster.record.run_directory import RunDirectory
from cluster.supervision.supervisor import Supervisor
from deploy.cluster_up.orders import scale, waiting_orders
from deploy.cluster_up.steering import Steering
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import resolved_yaml, validated
from tests.fakes import ListedEvents


def claimed(path, **settings) -> RunDirectory:
    """A run directory with a living driver: this process."""
    directory = RunDirectory(str(path))
    directory.claim(resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", **settings})))
    return directory


def orders(directory: RunDirectory) -> list[dict]:
    return [json.loads(directory.read_text(name)) for name in waiting_orders(directory)]


def test_an_order_is_left_for_the_driver(tmp_path):
    directory = claimed(tmp_path)
    scale(directory, actors="rollout_workers", number=4)
    assert orders(directory) == [{"rollout_workers": 4}]


@pytest.mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({}, "rollout_workers=0", "rollout_workers=0: a run needs at least 1; ask for 1 or more"),
        ({}, "reward_services=0", "reward_services=0: a run needs at least 1; ask for 1 or more"),
        ({}, "rollout_workers=100001", "rollout_workers=100001: a run has at most 100000; ask for fewer"),
        ({}, "reward_services=100001", "reward_services=100001: a run has at most 100000; ask for fewer"),
        (
            {"recorded": "runs/other"},
            "rollout_workers=2",
            "learns from recorded='runs/other', samples and judges nothing",
        ),
        ({"recorded": "runs/other"}, "reward_services=2", "only a run of `treadwheel train` has .* reward services"),
        (
            {"deterministic": True},
            "rollout_workers=2",
            "so the groups of each worker are fixed; start a run of its own",
        ),
        (
            {"rollout": {"colocated": True}},
            "rollout_workers=2",
            "is colocated, with one worker for each of the learner's ranks; start the run again",
        ),
        (
            {"elastic": {"max_workers": 3}},
            "rollout_workers=4",
            "rollout_workers=4 is outside .* elastic.max_workers=3; ask for a number between",
        ),
        (
            {"elastic": {"max_workers": 9}, "buffer": {"groups_per_step": 2, "max_off_policy_steps": 1}},
            "rollout_workers=5",
            "rollout_workers=5 is outside .* elastic.min_workers=1 to the 4 groups under way at once; ask for a number",
        ),
    ],
)
def test_what_the_driver_would_not_do_is_refused(settings, asked, reason, tmp_path):
    directory = claimed(tmp_path, **settings)
    actors, number = asked.split("=")
    with pytest.raises(ConfigError, match=reason):
        scale(directory, actors=actors, number=int(number))
    assert not orders(directory)


def test_orders_wait_for_the_driver_in_their_order(tmp_path):
    """The bounds of `elastic` are of rollout workers."""
    directory = claimed(tmp_path, elastic={"max_workers": 3})
    asked = [{"rollout_workers": 2}, {"reward_services": 4}, {"rollout_workers": 3}]
    for order in asked:
        ((actors, number),) = order.items()
        scale(directory, actors=actors, number=number)
    assert orders(directory) == asked


def test_an_order_that_is_still_being_written_is_none_yet(tmp_path):
    directory = claimed(tmp_path)
    (tmp_path / "order-1.json.tmp-77").write_text('{"rollout_w')
    assert waiting_orders(directory) == []


def test_a_run_without_a_driver_is_not_steered(tmp_path):
    claimed(tmp_path).release()
    with pytest.raises(ConfigError, match="has no living driver; set rollout"):
        scale(RunDirectory(str(tmp_path)), actors="rollout_workers", number=4)


class ScriptedFleet:
    """Notes what it is told."""

    def __init__(self, num_workers: int) -> None:
        self.num_wanted = num_workers
        self.num_coming = 0
        self.join_seconds: float | None = None
        self.told: list[tuple[str, object]] = []
        self.was_told = asyncio.Event()

    def want(self, num_workers: int) -> None:
        self.num_wanted = num_workers
        self.told.append(("want", num_workers))
        self.was_told.set()


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet(2)


@pytest.fixture
def services() -> ScriptedFleet:
    return ScriptedFleet(1)


@pytest.fixture
def deterministic() -> bool:
    return False


@pytest.fixture
def departures() -> asyncio.Queue[dict[str, float | None]]:
    return asyncio.Queue()


@pytest.fixture
def elastic() -> dict[str, int]:
    return {}


@pytest.fixture
def steering(tmp_path, fleet, services, departures, deterministic, elastic, monkeypatch):
    """Of a run with two workers and a reward service, that looks as often as it can."""
    monkeypatch.setattr("deploy.cluster_up.steering._POLL_S", 0.0)
    monkeypatch.setattr("deploy.cluster_up.steering._CLUSTER_POLL_S", 0.0)
    monkeypatch.setattr("deploy.cluster_up.notices.drivers_node", lambda: "drives")
    config = validated(
        {
            "model": {"path": "m"},
            "prompts": "file",
            "rollout": {"num_workers": 2},
            "deterministic": deterministic,
            "elastic": elastic,
        }
    )
    events = ListedEvents()
    supervisor = Supervisor(config.supervision, events)
    cluster = Cluster(
        production=SimpleNamespace(fleet=fleet, services=services, leave=departures.put),
        learner=SimpleNamespace(actors=lambda: [SimpleNamespace(node_id="learns")]),
        recorder=None,
        weights=None,
        supervisor=supervisor,
        timesheet=None,
    )
    events.add = lambda sink: None
    return Steering(config, cluster=cluster, run_dir=RunDirectory(str(tmp_path)), log=events)


def announce_none(monkeypatch) -> None:
    async def draining() -> dict[str, float | None]:
        return {}

    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)


async def test_an_order_is_obeyed_and_an_unreadable_one_is_an_event(steering, fleet, tmp_path, monkeypatch):
    announce_none(monkeypatch)
    directory = RunDirectory(str(tmp_path))
    async with asyncio.timeout(120), steering.steering():
        directory.write_file("order-1.json", b'{"rollout_workers": "many"}')
        directory.write_json("order-2.json", {"rollout_workers": 100_001})
        directory.write_json("order-3.json", {"rollout_workers": 5})
        await fleet.was_told.wait()
    assert fleet.told == [("want", 5)] and not orders(directory)
    assert [event["kind"] for event in steering._log.events] == ["steering_failed", "steering_failed", "scale"]
    for failed in steering._log.events[:2]:
        assert "is not an order; use `treadwheel scale" in failed["reason"]


async def test_a_run_directory_that_another_driver_took_ends_the_run(steering, monkeypatch):
    announce_none(monkeypatch)

    def lost() -> None:
        raise ClaimLostError("taken over by process 1 on elsewhere")

    monkeypatch.setattr(steering._run_dir, "check_claim", lost)
    with pytest.raises(ClaimLostError, match="taken over by"):
        async with asyncio.timeout(120), steering.steering():
            await asyncio.Event().wait()


async def test_an_order_that_comes_while_another_is_read_is_obeyed_too(
    steering, fleet, services, tmp_path, monkeypatch
):
    announce_none(monkeypatch)
    directory = RunDirectory(str(tmp_path))
    read_text = steering._run_dir.read_text

    def read_while_the_next_one_comes(name: str) -> str:
        text = read_text(name)
        if name == "order-1.json":
            directory.write_json("order-2.json", {"reward_services": 3})
        return text

    monkeypatch.setattr(steering._run_dir, "read_text", read_while_the_next_one_comes)
    directory.write_json("order-1.json", {"rollout_workers": 5})
    async with asyncio.timeout(120), steering.steering():
        await fleet.was_told.wait()
        await services.was_told.wait()
    assert (fleet.told, services.told) == ([("want", 5)], [("want", 3)])


@pytest.mark.parametrize("deterministic", [True])
async def test_a_deterministic_run_changes_its_reward_services_and_never_its_workers(
    steering, fleet, services, tmp_path, monkeypatch
):
    """The second order is written by hand."""
    announce_none(monkeypatch)
    directory = RunDirectory(str(tmp_path))
    async with asyncio.timeout(120), steering.steering():
        directory.write_json("order-1.json", {"reward_services": 3})
        await services.was_told.wait()
        directory.write_json("order-2.json", {"rollout_workers": 5})
        while len(steering._log.events) < 2:
            await asyncio.sleep(0)
    assert services.told == [("want", 3)] and not fleet.told
    scaled, refused = steering._log.events
    assert (scaled["actors"], scaled["before"], scaled["num_workers"]) == ("reward_services", 1, 3)
    assert "so the groups of each worker are fixed" in refused["reason"]


async def test_an_order_that_came_while_the_run_started_is_obeyed(steering, fleet, tmp_path, monkeypatch):
    announce_none(monkeypatch)
    RunDirectory(str(tmp_path)).write_json("order-1.json", {"rollout_workers": 5})
    async with asyncio.timeout(120), steering.steering():
        await fleet.was_told.wait()
    assert fleet.told == [("want", 5)]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_the_head_node_says_of_nodes_that_go_away_is_passed_on(steering, departures, monkeypatch):
    async def draining() -> dict[str, float | None]:
        return {"leaves": 1030.0}

    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)
    async with asyncio.timeout(120), steering.steering():
        assert await departures.get() == {"leaves": 1030.0}


def step_metrics(*, waited: float) -> dict[str, float]:
    return {
        "time/step_s": 1.0,
        "buffer/learner_wait_s": waited,
        "buffer/num_ready": 0.0,
        "rollout/idle_share": 0.25,
    }


@pytest.mark.parametrize("elastic", [{"max_workers": 8}])
async def test_a_waiting_learner_gets_workers_and_the_event_says_why(steering, fleet, monkeypatch):
    """2 workers, idle for a quarter, and a learner that waits for 0.6 of its time: 2 * 0.75 / 0.4 = 3.75."""
    announce_none(monkeypatch)
    fleet.join_seconds = 5.0
    for version in (1, 2, 3):
        steering.step(version, step_metrics(waited=0.6))
    async with asyncio.timeout(120), steering.steering():
        await fleet.was_told.wait()
    assert fleet.told == [("want", 4)]
    (event,) = steering._log.events
    assert not steering._loads, "steps of two workers say nothing of four"
    measured = {name: event[name] for name in ("before", "num_workers", "reason", "idle_share", "factor")}
    assert measured == {"before": 2, "num_workers": 4, "reason": "elastic", "idle_share": 0.25, "factor": 2.0}
    assert event["wait_share"] == pytest.approx(0.6) and event["join_seconds"] == 5.0


@pytest.mark.parametrize("elastic", [{"max_workers": 128}])
async def test_a_run_that_has_more_workers_than_groups_under_way_gives_them_back(steering, fleet, monkeypatch):
    """64 groups a step, on-policy."""
    announce_none(monkeypatch)
    fleet.num_wanted = 100
    steering._config = steering._config.model_copy(update={"rollout": RolloutConfig(num_workers=100)})
    async with asyncio.timeout(120), steering.steering():
        await fleet.was_told.wait()
    assert fleet.told == [("want", 64)]


@pytest.mark.parametrize("elastic", [{"max_workers": 8}])
async def test_a_fleet_of_which_one_always_dies_or_comes_grows(steering, fleet):
    """Of 2 workers 1.5 serve on average: 1.5 * 0.75 / 0.4 = 2.8."""
    for version in (1, 2, 3):
        for fleet.num_coming in (1, 0):
            await steering._look()
        steering.step(version, step_metrics(waited=0.6))
    await steering._look()
    assert fleet.told == [("want", 3)]


@pytest.mark.parametrize(
    ("node_id", "message"),
    [("learns", "a learner's node learns goes away in 30 s"), ("drives", "the driver's node drives goes away in 30 s")],
)
async def test_a_run_ends_when_a_node_that_it_cannot_do_without_goes_away(
    steering, departures, node_id, message, monkeypatch
):
    async def draining() -> dict[str, float | None]:
        return {"leaves": 2000.0, node_id: 1030.0}

    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    with pytest.raises(PreemptedError, match=message) as preempted:
        async with asyncio.timeout(120), steering.steering():
            await asyncio.Event().wait()
    assert preempted.value.deadline == 1030.0 and departures.empty()
    (event,) = steering._log.events
    assert (event["kind"], event["node_id"], event["seconds_left"]) == ("preempted", node_id, 30.0)


async def test_events_that_the_disk_does_not_take_do_not_hide_that_the_node_goes_away(steering, monkeypatch):
    class Full(ListedEvents):
        def add(self, sink: object) -> None: ...

        def event(self, kind: str, **fields: object) -> None:
            if not self.keeps_errors:
                raise StorageError("events.jsonl: Input/output error")
            super().event(kind, **fields)

    async def draining() -> dict[str, float | None]:
        return {"drives": None}

    monkeypatch.setattr(steering, "_log", Full())
    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)
    with pytest.raises(PreemptedError, match="the driver's node drives goes away"):
        async with asyncio.timeout(120), steering.steering():
            await asyncio.Event().wait()
    assert steering._log.kinds() == ["preempted"]


async def test_copies_that_take_long_do_not_keep_the_end_of_the_learners_node_from_being_seen(steering, monkeypatch):
    leaving = asyncio.Event()

    async def leave(draining: dict[str, float | None]) -> None:
        leaving.set()
        await asyncio.Event().wait()

    async def draining() -> dict[str, float | None]:
        return {"leaves": None} | ({"learns": None} if leaving.is_set() else {})

    steering._production.leave = leave
    monkeypatch.setattr("deploy.cluster_up.steering.draining_nodes", draining)
    with pytest.raises(PreemptedError, match="a learner's node learns goes away"):
        async with asyncio.timeout(120), steering.steering():
            await asyncio.Event().wait()


def test_what_is_logged_between_steps_is_no_step(steering):
    steering.step(3, {"eval/reward": 1.0})
    assert not steering._loads


def test_a_step_that_is_logged_twice_counts_once(steering):
    for version in (1, 2, 2):
        steering.step(version, step_metrics(waited=float(version)))
    assert [load.wait_seconds for load in steering._loads] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("buffer", "num_ready", "is_full"),
    [
        ({"groups_per_step": 2, "max_off_policy_steps": 3}, 6.0, True),
        ({"groups_per_step": 2, "max_off_policy_steps": 3}, 5.0, False),
        ({"groups_per_step": 2, "max_off_policy_steps": 0}, 0.0, False),
    ],
)
def test_a_buffer_is_full_that_holds_the_groups_of_all_steps_ahead(steering, buffer, num_ready, is_full):
    buffer = steering._config.buffer.model_copy(update=buffer)
    steering._config = steering._config.model_copy(update={"buffer": buffer})
    steering.step(1, step_metrics(waited=0.0) | {"buffer/num_ready": num_ready})
    assert steering._loads[-1].is_buffer_full is is_full


def test_the_rule_is_told_how_many_steps_are_left(steering):
    steering._config = steering._config.model_copy(update={"num_steps": 10})
    steering.step(7, step_metrics(waited=0.0))
    assert steering._fleet_now().num_steps_left == 3


def test_the_loads_of_a_long_run_are_those_that_the_rule_looks_at(steering):
    """`elastic.scale_down_full_steps` is 10."""
    for version in range(1000):
        steering.step(version, step_metrics(waited=float(version)))
    assert [load.wait_seconds for load in steering._loads] == [float(version) for version in range(990, 1000)]

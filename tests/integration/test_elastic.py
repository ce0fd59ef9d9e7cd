"""Nodes leave and join in mid-run, workers come and go by order and by rule. Several local Ray nodes, no machine but this one."""

import contextlib

import pytest

from tests.integration.commands import Background, treadwheel
from tests.integration.faults import Run, learner_held, slowed, until, write_endless_run
from tests.integration.ray_head import ray_head
from tests.integration.ray_nodes import SYSTEM, announce_end, end, ray_nodes
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.alone, pytest.mark.timeout(1800)]
LIMITS_S = {"rollout_worker": 120.0, "reward_service": 60.0, "learner": 120.0}
"""From the failure that was noticed to the replacement that serves, three of them at a time. Ray's head takes a core of the two while a
lost seat waits for a node."""


@pytest.fixture(scope="module")
def elastic(tmp_path_factory) -> Run:
    """Asked for three workers, with room for two: a node ends, two join, one ends, one announces its end, an order takes two away."""
    folder = tmp_path_factory.mktemp("elastic")
    file = write_endless_run(
        folder,
        make_tiny_model(folder / "model"),
        learner__cpus_per_rank=1.7,
        rollout__num_workers=3,
        rollout__cpus_per_worker=0.8,
        elastic={"max_workers": 3, "scale_up_wait_share": 1.0, "scale_down_full_steps": 1_000_000},
        supervision={"heartbeat_s": 1, "hang_s": 600},  # the learner is held
    )
    run = Run(folder / "run")
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(ray_nodes(num_cpus=1, _system_config=SYSTEM))
        # With 1.7 CPUs for the learner, 0.8 for each of two workers and a quarter for the reward service, all but one worker are here.
        # Nowhere else could the learner's bundle ever go: Ray's head does nothing but look for a place for bundles of a lost node
        # that would fit elsewhere if others were not there already (16 million times in 75 s were counted), and all else stands still.
        doomed = nodes.add_node(num_cpus=3)
        driver = stack.enter_context(run.start(file, "--address", nodes.address))
        until(lambda: run.num_steps() >= 3 and {"rollout-0", "rollout-1"} <= run.samplers(), process=driver)

        # The next steps' groups wait, each on the node of the worker that sampled it.
        with learner_held(run, process=driver):
            end(nodes, doomed)
            until(lambda: run.events("groups_lost"), process=driver)
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=driver)

        second = nodes.add_node(num_cpus=4)
        until(lambda: "rollout-2" in run.samplers(), process=driver)
        end(nodes, second)
        until(lambda: _failed(run, "rollout-2"), process=driver)
        third = nodes.add_node(num_cpus=4)
        until(lambda: run.has_recovered("rollout-2"), process=driver)

        announce_end(nodes, third)
        until(lambda: "rollout-2" in _left(run), process=driver)
        _scale(run, 1)
        until(lambda: [*run.metrics().values()][-1]["rollout/num_workers"] == 1, process=driver)
        shown = treadwheel("info", run.path).stdout
        assert "learner-0" in shown and "policy version" in shown and " for " in shown
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    return run


def test_a_run_starts_with_what_is_there_and_a_node_that_joins_brings_the_worker_that_found_no_room(elastic):
    asked = elastic.events("scale")[0]
    assert (asked["before"], asked["num_workers"], asked["reason"]) == (2, 3, "asked for")
    assert max(event["num_workers"] for event in elastic.events("broadcast")) == 3, "it is attested as all others are"


def test_groups_that_went_with_a_node_are_sampled_again_and_none_is_consumed_twice(elastic):
    lost = {index for event in elastic.events("groups_lost") for index in event["groups"]}
    consumed = [index for groups in elastic.groups() for index in groups]
    assert lost and lost < set(consumed)
    assert consumed == [*range(len(consumed))]
    assert elastic.problems() == ()


def test_what_a_node_took_is_back_in_time(elastic):
    seconds = elastic.recovery_seconds()
    taken = {kind: seconds[kind][0] for kind in LIMITS_S}
    assert all(taken[kind] < limit_s * elastic.slowness() for kind, limit_s in LIMITS_S.items()), taken


def test_a_node_that_announces_its_end_loses_its_worker_without_a_failure(elastic):
    fates = [event["decision"] for event in elastic.events("failure") if event["actor"] == "rollout-2"]
    assert fates == ["restart", "drain"], "first its node died, then another one said that it goes"


def test_an_order_takes_away_who_waits_for_a_node_and_keeps_one_that_serves(elastic):
    assert elastic.events("scale")[-1]["reason"] == "treadwheel scale"
    first, left = {"rollout-0", "rollout-1"}, _left(elastic)
    assert "rollout-3" in left and len(first & left) == 1


@pytest.mark.exhaustive
def test_rays_autoscaler_brings_the_node_that_the_rule_asks_for_and_takes_it_back(tmp_path):
    """The first worker is slow for a while, as on a machine that others use too; then the learner is, and two are more than it needs."""
    run = Run(tmp_path / "run")
    file = write_endless_run(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        sampling__max_tokens=4,  # sampled sooner than learned from, unless the worker is slow
        rollout__cpus_per_worker=1,
        elastic={"max_workers": 2, "scale_up_wait_share": 0.1, "scale_down_full_steps": 3},
    )
    with (
        ray_head(autoscaling=1) as head,
        Background("train", file, f"run_dir={run.path}", "--address", head.address, env=head.env) as driver,
    ):
        until(lambda: run.num_steps() >= 1, process=driver)
        with slowed(run, "rollout-0"):
            # Not always rollout-1: the rule may take back what it asked for before that one is there.
            until(lambda: run.samplers() - {"rollout-0"}, process=driver)
            until(lambda: head.num_nodes() == 2, process=driver)
        with slowed(run, "learner-0"):
            until(lambda: run.events("scale")[-1]["num_workers"] == 1, process=driver)
        until(lambda: head.num_nodes() == 1, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    grown, *_, shrunk = run.events("scale")
    assert (grown["before"], grown["num_workers"], grown["reason"]) == (1, 2, "elastic")
    assert grown["wait_share"] > 0.1 and grown["factor"] == 2.0
    assert (shrunk["before"], shrunk["num_workers"], shrunk["reason"]) == (2, 1, "elastic")
    assert shrunk["idle_share"] >= 0.5 and shrunk["join_seconds"] > 0
    assert run.problems() == ()


def _failed(run: Run, actor: str) -> bool:
    return any(event["actor"] == actor for event in run.events("failure"))


def _left(run: Run) -> set[str]:
    return {event["actor"] for event in run.events("worker_left")}


def _scale(run: Run, num_workers: int) -> None:
    ended = treadwheel("scale", run.path, f"rollout_workers={num_workers}")
    assert ended.returncode == 0, ended.stderr

"""A reward of three parts over two sources, two of them bad judges: a group is whole or gone, and nothing is a zero that was a failure.

A second reward service joins in mid-run and leaves again.
"""

import json
import math

import pytest

from tests.integration.commands import treadwheel
from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
JUDGES = "tests.integration.judges"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("parts")
    rows = [{"prompt": f"{number} + 1 =", "kind": "odd" if number % 2 else "even"} for number in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=100_000,
        deterministic=False,
        prompts={"name": "file", "path": str(folder / "prompts.jsonl"), "text_as": "text"},
        reward={
            "parts": {
                "digits": {"judge": f"{JUDGES}:digit_share", "weight": 2.0},
                "picky": {"judge": f"{JUDGES}:picky", "weight": 0.25},
                "wild": {"judge": f"{JUDGES}:wild", "weight": 0.5, "timeout_s": 0.5, "on_failure": "part"},
            },
            "by_source": {"even": ["digits", "picky"], "odd": ["digits", "wild"]},
            "source_column": "kind",
            "max_memory_bytes": 2**30,
        },
        algorithm={},
    )
    run = Run(folder / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 3, process=driver)
        _scale(run, 2)
        until(lambda: _is_judging(run, "reward-1"), process=driver)
        assert "reward-1" in treadwheel("info", run.path).stdout
        shared_from = run.num_steps()
        until(lambda: run.num_steps() >= shared_from + 3, process=driver)
        _scale(run, 1)
        until(lambda: run.events("worker_left"), process=driver)
        alone_from = run.num_steps()
        until(lambda: run.num_steps() >= alone_from + 3, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    return run


def _scale(run: Run, num_services: int) -> None:
    ended = treadwheel("scale", run.path, f"reward_services={num_services}")
    assert ended.returncode == 0, ended.stderr


def _is_judging(run: Run, service: str) -> bool:
    status = json.loads((run.path / "status.json").read_text())
    return any(each["actor"] == service and each["phase"] == "judging" for each in status["actors"])


def test_every_group_is_accounted_for_whichever_service_judged_it(run):
    assert run.problems() == ()
    consumed = [index for groups in run.groups() for index in groups]
    dropped = {int(event["group_id"]) for event in run.events("drop")}  # of which too many rewards failed
    assert consumed == [index for index in range(consumed[-1] + 1) if index not in dropped]


def test_a_service_joins_by_an_order_judges_and_leaves_by_the_next(run):
    changes = [(event["actors"], event["before"], event["num_workers"]) for event in run.events("scale")]
    assert changes == [("reward_services", 1, 2), ("reward_services", 2, 1)]
    joined = [event["actor"] for event in run.events("worker_joined")]
    assert joined.count("reward") == joined.count("reward-1") == 1
    assert [event["actor"] for event in run.events("worker_left")] == ["reward-1"]
    assert not run.events("failure")
    assert {each["rollout/num_services"] for each in run.whole_steps()} == {1.0, 2.0}


def test_each_reward_is_the_sum_of_its_groups_recipe(run):
    weights = {"digits": 2.0, "picky": 0.25, "wild": 0.5}
    recipes = {"even": {"digits", "picky"}, "odd": {"digits", "wild"}}
    num_left = 0
    for table in run.trajectories().values():
        for row in table.to_pylist():
            parts = dict(row["reward_components"])
            assert parts.keys() == recipes[json.loads(row["info"])["kind"]]
            if row["reward_status"] == "ok":
                known = {name: value for name, value in parts.items() if value is not None}
                assert row["reward"] == pytest.approx(math.fsum(weights[name] * value for name, value in known.items()))
                assert parts.keys() - known.keys() <= {"wild"}
            else:
                assert row["reward"] is None and row["reward_message"].startswith("judge:picky ValueError: nothing")
        for group in set(table["group_id"].to_pylist()):
            rows = [dict(row["reward_components"]) for row in table.to_pylist() if row["group_id"] == group]
            has_it = {row.get("wild") is not None for row in rows}
            assert len(has_it) == 1, "a part is there for the whole group or for none of it"
            num_left += "wild" in rows[0] and has_it == {False}
    assert num_left > 0


def test_failures_are_told_by_part_and_means_by_source(run):
    numbers = run.whole_steps()
    assert sum(each.get("reward/wild/num_failed", 0) for each in numbers) > 0
    assert all(each["time/digits/judging_s"] > 0 for each in numbers)
    assert any("reward/mean/odd" in each and "reward/digits/even" in each for each in numbers)
    told = {failure["kind"] for event in run.events("reward_failure") for failure in event["failures"]}
    assert "part left" in told

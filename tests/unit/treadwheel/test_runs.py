"""A run's directory as tables."""

import asyncio

import numpy as np
import pyarrow.compute as pc
import pytest

import treadwheel
from cluster.contracts.errors import ConfigError
from cluster.contracts.schema import to_batch
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder
from cluster.record.run_directory import METRICS, RunDirectory
from deploy.config.loading import resolved_yaml, validated
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import row
from tests.unit.treadwheel.notebook import in_a_cell, press_ctrl_c

CONFIG = validated({"model": {"path": "some/model"}, "prompts": "file", "buffer": {"groups_per_step": 1}})


def recorded(directory: RunDirectory) -> None:
    """Three steps of one group with one trajectory."""
    directory.write_file("run.yaml", resolved_yaml(CONFIG).encode())
    ledger, recorder = Ledger(directory), Recorder(directory)
    for index in range(3):
        group = row(ticket_index=index, group_id=f"{index:08d}", policy_versions=[index] * 3, reward=float(index))
        _, (name, digest) = recorder.record(index + 1, to_batch([group]))
        ledger.append(groups=[index], trajectories=name, trajectories_digest=digest)


@pytest.fixture
def run(tmp_path) -> treadwheel.Run:
    recorded(RunDirectory(str(tmp_path)))
    return treadwheel.open_run(str(tmp_path))


def test_it_reads_the_trajectories_of_all_steps_or_of_some(run):
    table = run.trajectories().to_table(columns=["step", "ticket_index", "reward"])
    assert table.to_pydict() == {"step": [1, 2, 3], "ticket_index": [0, 1, 2], "reward": [0.0, 1.0, 2.0]}
    assert run.trajectories(2).to_table(columns=["step"]).to_pydict() == {"step": [2]}
    assert run.trajectories([1, 3]).count_rows() == 2
    assert run.trajectories().to_table(filter=pc.field("step") > 2)["reward"].to_pylist() == [2.0]


def test_interrupting_the_kernel_ends_a_replay(run, monkeypatch):
    """Seen in review: no press ended it, and only its last step did."""

    async def endless(*_, **__) -> str:
        press_ctrl_c()
        await asyncio.sleep(5)
        return "digest"

    monkeypatch.setattr("deploy.replay._check_ends", lambda *_: None)
    monkeypatch.setattr("deploy.replay._replay", endless)
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(run.replay)


def test_a_step_that_is_not_there_is_named(run):
    with pytest.raises(ConfigError, match=r"step=4: .* has trajectories of steps 1 to 3"):
        run.trajectories(4)


def test_a_step_is_a_whole_number_also_one_of_numpys(run):
    assert run.trajectories(np.int64(2)).count_rows() == 1
    for step in ("1", 1.5, ["1"]):
        with pytest.raises(ConfigError, match=r"^step=.* is no number of a step; give a whole number, or several"):
            run.trajectories(step)


def test_an_object_store_gives_the_same():
    with s3("bucket"):
        recorded(RunDirectory("s3://bucket/run"))
        run = treadwheel.open_run("s3://bucket/run")
        assert run.trajectories().to_table(columns=["step", "reward"]).to_pydict() == {
            "step": [1, 2, 3],
            "reward": [0.0, 1.0, 2.0],
        }


def test_metrics_are_a_table_with_null_where_a_step_has_no_such_number(run, tmp_path):
    for line in (
        {"policy_version": 0, "time": 1.0, "eval/reward": 0.5},
        {"policy_version": 1, "time": 9.0, "reward/mean": 1},
    ):
        RunDirectory(str(tmp_path)).append_json(METRICS, line)
    assert run.metrics.to_pydict() == {
        "policy_version": [0, 1],
        "time": [1.0, 9.0],
        "eval/reward": [0.5, None],
        "reward/mean": [None, 1.0],
    }


def test_a_step_that_is_being_learned_again_is_one_row(run, tmp_path):
    directory = RunDirectory(str(tmp_path))
    for version, reward in ((1, 0.25), (2, 0.5), (1, 0.75)):
        directory.append_json(METRICS, {"policy_version": version, "time": float(version), "reward/mean": reward})
    assert run.metrics.to_pydict() == {"policy_version": [1, 2], "time": [1.0, 2.0], "reward/mean": [0.75, 0.5]}


def test_a_run_that_has_not_begun_has_empty_tables(tmp_path):
    RunDirectory(str(tmp_path)).write_file("run.yaml", resolved_yaml(CONFIG).encode())
    run = treadwheel.open_run(str(tmp_path))
    assert (run.num_steps, len(run.metrics), run.trajectories().count_rows()) == (0, 0, 0)
    assert (run.checkpoints, run.events, run.passport, run.is_running) == ([], [], {}, False)


def test_it_is_what_its_directory_says(run, tmp_path):
    (tmp_path / "checkpoints" / "step-000002" / "model").mkdir(parents=True)
    assert run.config == CONFIG and run.num_steps == 3 and repr(run) == f"treadwheel.open_run('{tmp_path}')"
    assert [(each.step, each.model) for each in run.checkpoints] == [(2, f"{tmp_path}/checkpoints/step-000002/model")]
    assert run.verify().num_trajectories == 3


def test_where_there_is_no_run_it_is_said(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        treadwheel.open_run(str(tmp_path))

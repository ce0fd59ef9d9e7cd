import contextlib
import shutil
import sys
from types import SimpleNamespace

import pytest
from mlflow.utils.validation import _validate_metric_name
from sqlalchemy import make_url

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from cluster.contracts.schema import to_batch
from cluster.metrics import MetricLog, resolve_sink
from cluster.record.recorder import Recorder
from cluster.record.run_directory import PASSPORT, RUN_YAML, RunDirectory
from cluster.sinks.mlflow import MLflow, _allowed
from cluster.sinks.tracked import Ending, Tracked, identity, parameters, tracker, trajectories, without_terminal
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import row


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"))


def test_every_driver_of_a_run_says_the_same_identity_and_another_run_another(directory, tmp_path):
    first = identity(directory)
    assert identity(RunDirectory(directory.url)) == first
    assert identity(RunDirectory(str(tmp_path / "other"))) != first


def test_settings_and_passport_are_flat_and_long_values_cut(directory):
    directory.write_file(RUN_YAML, b"seed: 7\nmodel: {path: m, adapters: [a, b]}\nempty: {}\n")
    directory.write_json(PASSPORT, {"mathematics": {"note": "x" * 501}})
    assert parameters(directory) == {
        "seed": 7,
        "model.path": "m",
        "model.adapters": '["a", "b"]',
        "empty": "{}",
        "passport.mathematics.note": "x" * 497 + "...",
    }


def test_the_trajectories_shown_are_from_the_best_to_the_worst(directory):
    rewards = [0.5, 0.0, 1.0, 0.25, None]
    rows = [
        row(sample_index=i, reward=each, reward_status=None if each is None else "ok") for i, each in enumerate(rewards)
    ]
    Recorder(directory).record(3, to_batch(rows))
    assert [each["reward"] for each in trajectories(directory, 3, 3)] == [1.0, 0.25, None]
    assert [each["reward"] for each in trajectories(directory, 3, 1)] == [1.0]
    assert trajectories(directory, 3, 0) == trajectories(directory, 4, 3) == []
    shutil.copy(directory.path("trajectories/step-000003.arrow"), directory.path("trajectories/step-000003-ab.arrow"))
    assert trajectories(directory, 3, 3) == [], "of two files only the ledger knows which one counts"


def test_steps_that_are_learned_again_after_a_failure_show_their_trajectories_once(directory):
    for version in (1, 2, 3, 4):
        Recorder(directory).record(version, to_batch([row()]))
    sink = Tracked(directory=directory, num_steps=4)
    assert [len(sink._trajectories(version)) for version in (1, 2, 3, 2, 3, 4)] == [1, 1, 1, 0, 0, 1]


def test_trajectories_that_cannot_be_read_leave_no_tracker_out(directory, monkeypatch):
    """They were removed since (record.keep_trajectories), or the store was away for longer than the look."""
    Recorder(directory).record(3, to_batch([row()]))
    monkeypatch.setattr(directory, "names", lambda _: ["step-000003.arrow", "step-000004.arrow"])
    assert len(trajectories(directory, 3, 3)) == 1
    assert trajectories(directory, 4, 3) == []


def test_a_tracker_asks_no_terminal_and_leaves_it_to_the_others():
    before = sys.stdin
    with without_terminal():
        assert sys.stdin.read() == ""
    assert sys.stdin is before


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'treadwheel\[no_such_tracker\]'"):
        tracker("no_such_tracker")


def test_a_key_in_a_run_file_is_refused_and_not_shown():
    config = MetricsConfig(sinks=(Plugin(name="wandb", params={"api_key": "hush-hush"}),))
    with pytest.raises(ConfigError, match="secrets come from the environment") as refused:
        resolve_sink(config, 0)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(("params", "is_private"), [({}, True), ({"private": False}, False)])
def test_a_space_that_trackio_makes_is_private_unless_the_run_file_says_otherwise(
    params, is_private, directory, monkeypatch
):
    asked = {}
    monkeypatch.setattr(
        "trackio.init", lambda **settings: asked.update(settings) or SimpleNamespace(log=lambda *_, **__: None)
    )
    directory.write_json(PASSPORT, {})
    config = MetricsConfig(sinks=(Plugin(name="trackio", params=params),))
    resolve_sink(config, 0)(directory=directory, num_steps=1).step(1, {})
    assert asked["private"] is is_private


@pytest.mark.parametrize(
    ("params", "variable", "project"),
    [
        ({}, None, "treadwheel"),
        ({}, "", "treadwheel"),
        ({}, "of-the-team", "of-the-team"),
        ({"project": "mine"}, "of-the-team", "mine"),
    ],
)
def test_wandbs_own_variable_names_the_project_unless_the_run_file_does(
    params, variable, project, directory, monkeypatch
):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    asked = {}
    run = SimpleNamespace(log=lambda *_: None, define_metric=lambda *_, **__: None)
    monkeypatch.setattr("wandb.init", lambda **settings: asked.update(settings) or run)
    directory.write_json(PASSPORT, {})
    config = MetricsConfig(sinks=(Plugin(name="wandb", params=params),))
    resolve_sink(config, 0)(directory=directory, num_steps=1).step(1, {})
    assert asked["project"] == project


@pytest.mark.parametrize(
    "name",
    ["", ".", "/a", "a/", "a//b", "a///", "../a", "a/./b", "a/..", "reward: x", "a" * 249 + "//", "a" * 249 + "/.b"],
)
def test_of_any_name_mlflow_takes_what_is_made(name):
    _validate_metric_name(_allowed(name))
    assert _allowed("reward/mean.of/..x") == "reward/mean.of/..x"


def test_sources_with_names_in_any_script_stay_apart_in_mlflow():
    names = ["reward/mean/数学", "reward/mean/语文", "reward/mean/é"]
    for name in names:
        _validate_metric_name(_allowed(name))
    assert [_allowed(name) for name in names] == names
    assert _allowed("reward/mean/कि") != _allowed("reward/mean/की"), "a mark on a letter is none"


@pytest.mark.parametrize(
    ("name", "is_read"), [("a b#1", True), ("100%", True), ("lr=1?seed=2", False), ("a%2Fb", False)]
)
def test_mlflow_without_a_server_refuses_a_path_that_it_would_read_as_another(name, is_read, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = RunDirectory(str(tmp_path / name))
    refusal = pytest.raises(ConfigError, match=r"mlflow reads .* differently")
    with contextlib.nullcontext() if is_read else refusal:
        assert make_url(MLflow(directory=directory, num_steps=1)._uri or "").database == directory.path("mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    MLflow(directory=directory, num_steps=1)


@pytest.mark.parametrize(("name", "folder"), [("wandb", "WANDB_DIR"), ("swanlab", "SWANLAB_LOGDIR")])
def test_a_run_in_a_store_has_no_place_for_offline_files_unless_one_is_named(name, folder, monkeypatch, tmp_path):
    for variable in (f"{name.upper()}_API_KEY", f"{name.upper()}_MODE", folder):
        monkeypatch.delenv(variable, raising=False)
    make = resolve_sink(MetricsConfig(sinks=(Plugin(name=name),)), 0)
    with s3("bucket"):
        stored = RunDirectory("s3://bucket/run")
        with pytest.raises(
            ConfigError, match=f"{name} keeps a run offline on a disk; set .*_API_KEY or .* or {folder}, or"
        ):
            make(directory=stored, num_steps=1)
        monkeypatch.setenv(folder, str(tmp_path))
        make(directory=stored, num_steps=1)


class Foreign:
    """A tracker whose own exceptions nobody here knows."""

    def step(self, version, metrics) -> None:
        raise ZeroDivisionError("its own mistake")

    def event(self, record) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_that_fails_in_its_own_way_is_loud_and_ends_no_run(capsys):
    with MetricLog([Foreign()]) as log:
        log.step(1, {})
        log.step(2, {})
    assert capsys.readouterr().err.count("Foreign is left out from now on: ZeroDivisionError: its own") == 1


@pytest.mark.parametrize(
    ("kinds", "kind", "reason"),
    [
        (("launched", "finished"), "finished", ""),
        (("failed",), "failed", "the disk is full"),
        (("stopped",), "stopped", ""),
        (("preempted", "stopped"), "preempted", "node 7 goes away"),
        (("preempted", "failed"), "failed", "the disk is full"),
        (("preempted",), None, ""),
    ],
)
def test_a_run_that_stops_because_its_node_goes_away_is_preempted(kinds, kind, reason):
    said = {"preempted": {"message": "node 7 goes away"}, "failed": {"reason": "the disk is full"}}
    ending = Ending()
    told = [ending.hear({"kind": each, **said.get(each, {})}) for each in kinds]
    assert (told[-1], ending.kind, ending.reason) == (kind, kind, reason)

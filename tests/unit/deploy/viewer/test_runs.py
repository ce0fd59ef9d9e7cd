"""Runs have short names that last, and say how they are."""

import json
import shutil

import pytest
from starlette.testclient import TestClient

from cluster.contracts.errors import StorageError
from cluster.record import store_claim
from cluster.record.run_directory import RunDirectory
from deploy.viewer.app import create_app
from deploy.viewer.runs import Run, Runs
from tests.object_store import s3
from tests.unit.deploy.viewer.run_files import event, step, write_run


def _names(runs: Runs) -> dict[str, str]:
    return {run.name: run.place for run in runs.all()}


def test_a_run_is_found_by_its_folder_and_below_the_folders_above(tmp_path):
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b c" / "run")
    (tmp_path / "a" / "run.yaml").write_text("num_steps: 1")  # a run file beside its run is no run
    (tmp_path / "notes.txt").write_text("")
    assert _names(Runs([str(one)])) == {"run": str(one)}
    assert _names(Runs([str(tmp_path)])) == {"a-run": str(one), "b-c-run": str(two)}
    assert _names(Runs([str(one), str(two)])) == {"run": str(one), "run-2": str(two)}
    assert Runs([str(one)]).is_one and not Runs([str(tmp_path)]).is_one


def test_a_run_with_a_link_beside_it_is_listed_once_by_its_own_name(tmp_path):
    real, elsewhere = write_run(tmp_path / "runs" / "seed-1"), write_run(tmp_path / "scratch" / "big")
    (tmp_path / "runs" / "latest").symlink_to("seed-1")
    (tmp_path / "runs" / "moved").symlink_to(elsewhere)
    assert _names(Runs([str(tmp_path / "runs")])) == {"seed-1": str(real), "moved": str(elsewhere)}
    alone = Runs([str(tmp_path / "runs" / "latest")])
    assert alone.is_one and _names(alone) == {"seed-1": str(real)}


def test_hidden_folders_and_those_more_than_three_levels_below_are_not_searched(tmp_path):
    for path in ("a/b/run", "a/b/c/run", ".trash/run"):
        write_run(tmp_path / path)
    assert list(_names(Runs([str(tmp_path)]))) == ["a-b-run"]


def test_a_run_that_begins_later_is_found_and_takes_no_name_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.viewer.runs._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("deploy.viewer.runs._LOOK_SHARE", 0)
    late = write_run(tmp_path / "x b")
    runs = Runs([str(tmp_path)])
    early = write_run(tmp_path / "x-b")
    assert _names(runs) == {"x-b": str(late), "x-b-2": str(early)}


def test_a_run_that_was_removed_is_not_listed_and_one_in_its_place_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.viewer.runs._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("deploy.viewer.runs._LOOK_SHARE", 0)
    kept, removed = write_run(tmp_path / "kept"), write_run(tmp_path / "removed", steps=[step(1, reward__mean=0.5)])
    runs = Runs([str(tmp_path)])
    assert runs.get("removed").metrics() != []
    shutil.rmtree(removed)
    assert _names(runs) == {"kept": str(kept)} and runs.get("removed") is None
    write_run(removed)
    assert _names(runs) == {"kept": str(kept), "removed": str(removed)} and runs.get("removed").metrics() == []


def _refuse(monkeypatch, *folders) -> None:
    """To list them, as the system does where they are somebody else's: a mode would not stop root."""
    names, refused = RunDirectory.names, [str(folder) for folder in folders]

    def listed(self: RunDirectory, folder: str = "") -> list[str]:
        if self.path(folder) in refused:
            raise StorageError(f"{self.path(folder)}: Permission denied")
        return names(self, folder)

    monkeypatch.setattr(RunDirectory, "names", listed)


def test_a_folder_that_cannot_be_read_hides_no_other_run(tmp_path, monkeypatch):
    run = write_run(tmp_path / "team" / "run")
    for name in ("lost+found", "team/colleague"):
        (tmp_path / name).mkdir()
    _refuse(monkeypatch, tmp_path / "lost+found", tmp_path / "team" / "colleague")
    assert _names(Runs([str(tmp_path)])) == {"team-run": str(run)}


def test_a_root_that_goes_away_is_said_on_a_page_and_its_runs_stay(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    app = create_app([str(tmp_path)])
    browser = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    _refuse(monkeypatch, tmp_path)
    monkeypatch.setattr("deploy.viewer.runs._LOOK_EVERY_S", 3600.0)
    app.state.runs._next_look = 0.0
    answer = browser.get("/runs")
    assert answer.status_code == 500 and f"{tmp_path}: Permission denied" in answer.text
    again = browser.get("/runs")
    assert again.status_code == 200 and "/run/run/" in again.text


def test_lines_of_a_run_that_nobody_looks_at_are_forgotten_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.viewer.runs._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("deploy.viewer.runs._LOOK_SHARE", 0)
    runs = Runs([str(write_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)]))])
    (run,) = runs.all()
    shown, seen = run.metrics(), run.mark()
    runs.all()
    assert run.mark() == seen
    monkeypatch.setattr("deploy.viewer.runs._FORGET_AFTER_S", -1.0)
    runs.all()
    assert not run._metrics.is_read and run.glance()[0]["reward/mean"] == 0.5 and run.state() == "killed"
    assert run.metrics() == shown and run.mark() != seen, "a page that comes back reads all of it again"


def test_a_run_says_how_it_ended(tmp_path):
    def state(name: str, *events) -> str:
        return Run(name, RunDirectory(str(write_run(tmp_path / name, events=events)))).state()

    assert state("a", event("finished", 1001.0)) == "finished"
    assert state("b", event("failed", 1001.0, reason="x")) == "failed"
    assert state("c", event("stopped", 1001.0), event("launched", 1002.0)) == "killed"


def test_a_run_whose_driver_lives_is_running(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"))
    directory.claim("num_steps: 1\n")
    try:
        write_run(tmp_path / "other")
        (tmp_path / "other" / "events.jsonl").rename(tmp_path / "run" / "events.jsonl")
        assert Run("run", RunDirectory(str(tmp_path / "run"))).state() == "running"
    finally:
        directory.release()
    assert Run("run", RunDirectory(str(tmp_path / "run"))).state() == "killed"


def test_secrets_of_a_configuration_are_not_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "run.yaml").write_text("prompts: {api_key: sesame}\n")
    assert Run("run", RunDirectory(str(folder))).config() == {"prompts": {"api_key": "<hidden>"}}


@pytest.mark.parametrize("status", [b'{"time": 1', b"\xff", b"[1]", b'{"time": 1, "actors": null}'])
def test_a_run_whose_status_cannot_be_read_tells_of_no_actor(status, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "status.json").write_bytes(status)
    assert Run("run", RunDirectory(str(folder))).status() == {"time": 0.0, "actors": []}


def test_a_run_in_an_object_store_is_found_and_read_without_a_write(monkeypatch):
    with s3("runs-to-view"):
        driver = RunDirectory("s3://runs-to-view/team/first")
        driver.claim("num_steps: 3\n")
        driver.append_json("metrics.jsonl", step(1, reward__mean=0.5))
        driver.append_json("events.jsonl", event("launched", 1000.0))
        driver.flush_lines()
        before = _objects(driver)
        (run,) = Runs(["s3://runs-to-view"]).all()
        assert (run.name, run.state()) == ("team-first", "running"), "it says nothing yet of its actors"
        assert json.dumps(run.metrics()) == json.dumps([step(1, reward__mean=0.5)])
        with monkeypatch.context() as patch:
            patch.setattr(store_claim, "LEASE_S", -1.0)
            assert run.state() == "killed"
        assert _objects(driver) == before
        driver.append_json("events.jsonl", event("finished", 1001.0))
        driver.flush_lines()
        assert Run("run", RunDirectory(driver.url)).state() == "finished", "before it gives the directory back"
        driver.release()
        assert run.state() == "killed"


def test_runs_below_folders_of_any_name_are_found_in_an_object_store_too(monkeypatch):
    with s3("dotted"):
        for name in ("lr-0.1/seed-1", "qwen2.5"):
            driver = RunDirectory(f"s3://dotted/{name}")
            driver.claim("num_steps: 3\n")
            driver.append_json("events.jsonl", event("launched", 1000.0))
            driver.release()
        driver.write_file("notes.txt/run.yaml/x", b"")
        assert list(_names(Runs(["s3://dotted"]))) == ["lr-0.1-seed-1", "qwen2.5"]


def _objects(directory: RunDirectory) -> list[str]:
    return [*directory.names(), *directory.names("metrics"), *directory.names("events")]

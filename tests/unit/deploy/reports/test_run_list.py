"""Runs below a folder, with their state and last numbers; whatever else lies there."""

import io
import os

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import EVENTS, METRICS, RUN_YAML, RunDirectory
from cluster.record.storage import Storage
from deploy.cli import app
from deploy.config.loading import resolved_yaml, validated
from deploy.reports import run_list
from deploy.reports.run_list import Listed, listed, run_directories, table
from tests.object_store import s3

NOW = 1000.0
URL = "s3://bucket/run"
YAML = resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", "num_steps": 40}))


def made(folder, *events: dict, step: int = 7) -> RunDirectory:
    directory = RunDirectory(str(folder))
    directory.claim(YAML)
    directory.append_json(METRICS, {"policy_version": 4, "time": 5.0, "reward/mean": 0.25, "eval/reward": 0.75})
    directory.append_json(
        METRICS, {"policy_version": step, "time": 9.0, "reward/mean": 0.5, "speed/sampling_tokens_per_s": 3412.0}
    )
    for event in events:
        directory.append_json(EVENTS, {"time": 10.0, **event})
    directory.release()
    return directory


def test_a_run_is_one_line_of_its_last_numbers(tmp_path):
    made(tmp_path / "a", {"kind": "launched"}, {"kind": "finished"})
    (found,) = listed(run_directories(str(tmp_path)), now=NOW)
    assert found == Listed(
        run_dir=str(tmp_path / "a"),
        state="finished",
        step=7,
        num_steps=40,
        reward=0.5,
        held_out_reward=0.75,
        sampling_tokens_per_s=3412.0,
        age_s=990.0,
    )


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"kind": "launched"}, {"kind": "finished"}], "finished"),
        ([{"kind": "launched"}, {"kind": "failed", "reason": "disk full"}], "failed"),
        ([{"kind": "launched"}, {"kind": "stopped"}], "stopped"),
        ([{"kind": "launched"}, {"kind": "preempted", "message": "node leaves"}, {"kind": "stopped"}], "preempted"),
        ([{"kind": "preempted"}, {"kind": "stopped"}, {"kind": "launched"}, {"kind": "stopped"}], "stopped"),
        ([{"kind": "finished"}, {"kind": "launched"}, {"kind": "checkpoint"}], "dead"),
        ([], "new"),
    ],
)
def test_the_state_is_that_of_the_last_driver(tmp_path, events, state):
    made(tmp_path / "a", *events)
    assert listed([str(tmp_path / "a")], now=NOW)[0].state == state


def test_a_driver_was_killed_also_where_its_events_are_too_long_to_be_read_to_its_start(tmp_path, monkeypatch):
    made(tmp_path / "a", {"kind": "launched"}, *[{"kind": "checkpoint"}] * 20)
    monkeypatch.setattr(run_list, "_MOST_BYTES", 200)
    assert listed([str(tmp_path / "a")], now=NOW)[0].state == "dead"


def test_an_evaluation_thousands_of_steps_ago_is_listed(tmp_path, monkeypatch):
    directory = made(tmp_path / "a", {"kind": "finished"})
    for step in range(8, 30):
        directory.append_json(METRICS, {"policy_version": step, "time": 9.0, "reward/mean": 0.5})
    monkeypatch.setattr(run_list, "_MOST_BYTES", 200)
    (found,) = listed([str(tmp_path / "a")], now=NOW)
    assert (found.step, found.reward, found.held_out_reward) == (29, 0.5, 0.75)


def test_a_run_with_a_living_driver_runs(tmp_path):
    directory = made(tmp_path / "a", {"kind": "finished"})
    directory.claim(YAML)
    try:
        assert listed([str(tmp_path / "a")], now=NOW)[0].state == "running"
    finally:
        directory.release()


@pytest.mark.parametrize("comes", [True, False])
def test_a_driver_that_comes_or_goes_while_its_events_are_read_was_not_killed(tmp_path, monkeypatch, comes):
    made(tmp_path / "a", {"kind": "launched"})
    is_living, read = not comes, run_list._last_lines

    def reading(directory, name):
        nonlocal is_living
        is_living = comes
        return read(directory, name)

    monkeypatch.setattr(run_list, "_last_lines", reading)
    monkeypatch.setattr(RunDirectory, "owner", lambda _: "process 7 on node-1" if is_living else None)
    assert listed([str(tmp_path / "a")], now=NOW)[0].state == "running"


def test_damaged_and_foreign_folders_break_nothing(tmp_path):
    made(tmp_path / "sweep" / "seed-1", {"kind": "finished"})
    (tmp_path / "photos").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    for name, text in (("torn", "num_steps: [1"), ("list", "- 1"), ("bare", ""), ("binary", "\x00\x01")):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_YAML).write_text(text)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / RUN_YAML).write_text(YAML)
    damaged = b'\xff\xfe\n[1]\n{"policy_version": 3, "time": 1.0}\n{"policy_version": "4", "time": 1.0}\n{torn'
    (tmp_path / "lines" / METRICS).write_bytes(damaged)
    (tmp_path / "folder" / RUN_YAML).mkdir(parents=True)
    found = {os.path.basename(run.run_dir): run for run in listed(run_directories(str(tmp_path)), now=NOW)}
    assert {name: run.state for name, run in found.items()} == {
        "seed-1": "finished",
        "torn": "damaged",
        "list": "damaged",
        "bare": "damaged",
        "binary": "damaged",
        "lines": "new",
    }
    assert found["lines"].step == 3
    assert found["list"].reason == "run.yaml is not the settings of a run"


def test_a_folder_that_is_not_there_holds_no_runs(tmp_path):
    assert run_directories(str(tmp_path / "none")) == []


def test_a_run_behind_a_link_is_listed_and_no_run_twice(tmp_path):
    made(tmp_path / "scratch" / "big")
    made(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "big").symlink_to(tmp_path / "scratch" / "big")
    (tmp_path / "runs" / "z-latest").symlink_to("big")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert run_directories(str(tmp_path / "runs")) == [str(tmp_path / "runs" / name) for name in ("a", "big")]


def test_a_run_is_listed_by_its_own_folder_not_by_a_link_to_it(tmp_path):
    made(tmp_path / "sweep" / "seed-1")
    (tmp_path / "latest").symlink_to("sweep/seed-1")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "one").symlink_to(tmp_path / "sweep" / "seed-1")
    assert run_directories(str(tmp_path)) == [str(tmp_path / "sweep" / "seed-1")]


def test_the_latest_comes_first_and_the_table_shows_all(tmp_path):
    for name, at in (("old", 10.0), ("young", 900.0)):
        made(tmp_path / name, {"kind": "finished", "time": at})
    runs = listed(run_directories(str(tmp_path)), now=NOW)
    assert [os.path.basename(run.run_dir) for run in runs] == ["young", "old"]
    out = io.StringIO()
    Console(file=out, width=200).print(table(runs))
    line = next(line for line in out.getvalue().splitlines() if "young" in line)
    assert line.split()[1:] == ["finished", "7", "of", "40", "0.500", "0.750", "3,412", "100", "s", "ago"]


def test_the_name_of_anothers_folder_does_nothing_to_the_terminal(tmp_path):
    made(tmp_path / "a\x1b]0;owned\x07b")
    made(tmp_path / "c[red]d")
    out = io.StringIO()
    Console(file=out, width=300).print(table(listed(run_directories(str(tmp_path)), now=NOW)))
    assert "ab" in out.getvalue() and "\x1b" not in out.getvalue()
    assert "c[red]d" in out.getvalue()


def test_runs_below_a_stores_prefix_are_found():
    with s3("listed"):
        made("s3://listed/team/a", {"kind": "finished"})
        made("s3://listed/team/sweep/b", {"kind": "failed", "reason": "disk full"})
        made("s3://listed/team/qwen2.5", {"kind": "finished"})
        made("s3://listed/team/lr-0.1/seed-1", {"kind": "finished"})
        made("s3://listed/other/c")
        found = {run.run_dir: run.state for run in listed(run_directories("s3://listed/team"))}
    assert found == {
        "s3://listed/team/a": "finished",
        "s3://listed/team/lr-0.1/seed-1": "finished",
        "s3://listed/team/qwen2.5": "finished",
        "s3://listed/team/sweep/b": "failed",
    }


@pytest.mark.parametrize("command", [["runs", URL], ["passport", "diff", URL, URL], ["export", URL, "out"]])
def test_commands_say_within_seconds_that_a_store_does_not_answer(command, tmp_path, monkeypatch):
    def refused(self):
        raise StorageError("nothing answers")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Storage, "reach", refused)
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 1 and "nothing answers" in ended.output

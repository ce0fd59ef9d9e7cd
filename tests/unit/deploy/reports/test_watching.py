"""A run's standing, from its directory, as it grows."""

import contextlib

import pytest

from cluster.contracts.errors import ConfigError, StorageError
from cluster.record.run_directory import EVENTS, METRICS, STATUS, RunDirectory
from cluster.sinks.console import standing_of
from cluster.sinks.jsonl import JsonLines
from deploy.config.loading import resolved_yaml, validated
from deploy.reports import watching
from deploy.reports.watching import Watched, watch

YAML = resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", "num_steps": 40}))


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.claim(YAML)
    yield directory
    directory.release()


def step(directory: RunDirectory, version: int, at: float, **more: float) -> None:
    line = {"policy_version": version, "time": at, "time/step_s": 2.0, "reward/mean": version / 10, **more}
    directory.append_json(METRICS, line)


def test_each_look_takes_in_what_is_new(directory):
    standing = standing_of(directory, now=lambda: 20.0)
    watched = Watched(directory, standing)
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0})
    step(directory, 1, 10.0)
    assert [each["kind"] for each in watched.look()] == ["launched", "step"]
    assert (standing.num_steps, standing.version, standing.max_off_policy_steps) == (40, 1, 0)
    step(directory, 2, 14.0)
    directory.append_json(EVENTS, {"kind": "checkpoint", "time": 15.0, "policy_version": 2})
    assert [each["kind"] for each in watched.look()] == ["step", "checkpoint"]
    assert standing.rewards == [(1, 0.1), (2, 0.2)] and standing.pace.seconds_per_step == 4.0
    assert watched.look() == []


def test_a_clock_that_was_set_back_between_two_drivers_ends_no_run_that_goes_on(directory):
    standing = standing_of(directory)
    for kind, at in (("launched", 5000.0), ("failed", 6000.0), ("launched", 1000.0), ("resumed", 1001.0)):
        directory.append_json(EVENTS, {"kind": kind, "time": at, "reason": "a full disk", "recorded_steps": 1})
    step(directory, 1, 5500.0)
    step(directory, 2, 1010.0)
    news = Watched(directory, standing).look()
    assert [each["kind"] for each in news if each["kind"] != "step"] == ["launched", "failed", "launched", "resumed"]
    assert [each["policy_version"] for each in news if each["kind"] == "step"] == [1, 2]
    assert not standing.is_over and standing.version == 2


def test_a_line_that_is_being_written_is_taken_in_when_it_is_whole(directory, tmp_path):
    standing = standing_of(directory)
    watched = Watched(directory, standing)
    step(directory, 1, 10.0)
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"policy_version": 2, "ti')
    watched.look()
    assert standing.version == 1
    with open(tmp_path / METRICS, "a") as file:
        file.write('me": 12.0}\n')
    watched.look()
    assert standing.version == 2


def test_a_file_that_was_written_anew_is_read_anew(directory):
    standing = standing_of(directory)
    watched = Watched(directory, standing)
    for version in (1, 2, 3):
        step(directory, version, 10.0 + version)
    watched.look()
    directory.replace_lines(
        METRICS, ['{"policy_version": 1, "time": 11.0, "reward/mean": 0.9, "more": 1234567890}'] * 4
    )
    step(directory, 2, 14.0)
    watched.look()
    assert standing.rewards == [(1, 0.9), (2, 0.2)]


def test_of_a_file_that_was_written_anew_steps_that_are_as_they_were_are_not_told_again(directory):
    """A resumed run writes it anew for each step that it learns again."""
    watched = Watched(directory, standing_of(directory))
    sink = JsonLines(directory)
    for version in range(1, 6):
        sink.step(version, {"reward/mean": 0.5})
    assert len(watched.look()) == 5
    resumed = JsonLines(directory)
    resumed.step(4, {"reward/mean": 0.123456})
    assert [each["policy_version"] for each in watched.look()] == [4]
    resumed.step(5, {"reward/mean": 0.123456})
    assert [each["policy_version"] for each in watched.look()] == [5]


def test_a_store_that_does_not_answer_for_a_while_ends_no_watching(directory, monkeypatch):
    """Seen in review: no answer about the owner ended it."""

    def away() -> list:
        raise StorageError("the store does not answer")

    standing = standing_of(directory)
    watched = Watched(directory, standing)
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0})
    monkeypatch.setattr(watched._metrics, "new_records", away)
    monkeypatch.setattr(directory, "owner", away)
    with pytest.raises(StorageError):
        Watched(directory, standing).look()
    monkeypatch.setattr(RunDirectory, "is_local", False)
    assert [each["kind"] for each in watched.look()] == ["launched"] and standing.phase != "gone"


def test_a_driver_that_went_without_a_word_is_told(directory):
    standing = standing_of(directory)
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0})
    directory.release()
    Watched(directory, standing).look()
    assert standing.phase == "gone" and standing.is_over


def test_a_driver_that_ends_while_it_is_looked_for_did_not_go_without_a_word(directory, monkeypatch):
    def owner() -> None:
        directory.append_json(EVENTS, {"kind": "finished", "time": 2.0})

    standing = standing_of(directory)
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0})
    monkeypatch.setattr(directory, "owner", owner)
    assert [each["kind"] for each in Watched(directory, standing).look()] == ["launched", "finished"]
    assert standing.phase == "finished"


def test_the_owner_is_asked_for_at_every_fifth_look(directory, monkeypatch):
    """In an object store each question is billed."""
    asked: list[str] = []
    monkeypatch.setattr(directory, "owner", lambda: asked.append("") or "process 1 on node-1")
    watched = Watched(directory, standing_of(directory))
    for _ in range(6):
        watched.look()
    assert len(asked) == 2


def test_what_the_actors_do_is_shown(directory):
    standing = standing_of(directory)
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0})
    doing = {"actor": "learner-0", "phase": "learning", "since": 2.0, "policy_version": 0}
    directory.write_json(STATUS, {"time": 2.0, "actors": [doing]})
    Watched(directory, standing).look()
    assert [(each.actor, each.phase) for each in standing.actors] == [("learner-0", "learning")]


def test_a_folder_without_a_run_is_not_watched(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        watch(RunDirectory(str(tmp_path)), sleep=lambda _: pytest.fail("it waits"))


def test_in_a_terminal_it_looks_until_the_end(directory, monkeypatch):
    def sleep(seconds: float) -> None:
        assert not slept
        slept.append(seconds)
        directory.append_json(EVENTS, {"kind": "finished", "time": 13.0})

    slept: list[float] = []
    monkeypatch.setattr(watching, "is_live", lambda stream: True)
    monkeypatch.setattr(watching, "live", lambda drawn: contextlib.nullcontext())
    watch(directory, sleep=sleep)
    assert slept == [1.0]


def test_without_a_terminal_it_prints_lines_until_the_end(directory, capsys):
    step(directory, 1, 10.0)
    step(directory, 2, 12.0)

    def sleep(_: float) -> None:
        directory.append_json(EVENTS, {"kind": "finished", "time": 13.0})

    watch(directory, sleep=sleep)
    assert capsys.readouterr().out.splitlines() == ["step 1/40  reward 0.100", "step 2/40  reward 0.200  left 0:01:16"]

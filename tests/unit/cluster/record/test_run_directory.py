import errno
import fcntl
import json
import math
import os
import re
import stat
import subprocess
import sys

import pytest
import yaml

from cluster.contracts.errors import ConfigError, DamagedError, StorageError
from cluster.contracts.hiding import hidden
from cluster.record import local_files, lock
from cluster.record.ledger import NAME as LEDGER
from cluster.record.ledger import Ledger
from cluster.record.local_files import LocalFiles, sync_files
from cluster.record.run_directory import EVENTS, METRICS, PASSPORT, PHASES, RUN_YAML, STATUS, VERDICTS, RunDirectory
from tests.unit.learner.disk import largest_file

CONFIG = yaml.safe_dump({"seed": 1, "num_steps": 10, "optimizer": {"learning_rate": 0.1}})


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"))
    yield directory
    directory.release()


@pytest.mark.parametrize("url", [".", "./", "../run", "sub/.."])
def test_its_name_is_that_of_its_folder_however_it_is_named(url, tmp_path, monkeypatch):
    """Seen before: the report of a run that was asked for in its own folder was one of the run ".", and so were its numbers."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert RunDirectory(url).name == "run"


def test_a_file_comes_back_whole(directory):
    directory.write_file("checkpoints/a.bin", b"abc")
    assert directory.read_file("checkpoints/a.bin").to_pybytes() == b"abc"
    assert directory.names("checkpoints") == ["a.bin"]


def test_lines_come_back_in_order(directory):
    directory.append_line("ledger/ledger.jsonl", "one")
    directory.append_line("ledger/ledger.jsonl", "two")
    assert directory.read_lines("ledger/ledger.jsonl") == ["one", "two"]
    directory.replace_lines("ledger/ledger.jsonl", ["one"])
    directory.append_line("ledger/ledger.jsonl", "three")
    assert directory.read_lines("ledger/ledger.jsonl") == ["one", "three"]


def test_lines_share_their_names(directory):
    for number in (1, 2):
        directory.append_json(METRICS, {"policy_version": number, "time": 1.0, "reward/a part": 0.5})
    one, other = directory.read_json_lines(METRICS)
    assert all(name is same for name, same in zip(one, other, strict=True))


def test_a_last_line_that_lost_only_its_newline_is_torn_though_it_reads_as_whole(directory):
    def record(*groups):
        return Ledger(directory).append(groups=groups, trajectories="file", trajectories_digest="digest")

    record(0, 1)
    record(2, 3)
    raw = directory.read_file(LEDGER).to_pybytes()
    directory.write_file(LEDGER, raw[:-1])
    torn = Ledger(directory)
    assert (torn.version, torn.num_torn_lines, [each.groups for each in torn.records()]) == (1, 1, [(0, 1)])
    record(4, 5)
    record(6, 7)
    after = Ledger(directory)
    assert (after.version, after.num_torn_lines) == (3, 0)
    assert [each.groups for each in after.records()] == [(0, 1), (4, 5), (6, 7)]


def test_a_last_event_without_its_newline_is_left_out(directory):
    directory.write_file(EVENTS, b'{"kind": "stopped", "time": 1.0}\n{"kind": "finished"}')
    assert directory.read_json_lines(EVENTS) == [{"kind": "stopped", "time": 1.0}]


def test_no_json_has_nan_or_infinity_which_other_languages_refuse(directory):
    content = {"policy_version": 1, "b": math.nan, "c": [math.inf, {"d": -math.inf}]}
    directory.write_json(PASSPORT, content)
    directory.append_json("lines.jsonl", content)
    expected = {"policy_version": 1, "b": None, "c": [None, {"d": None}]}
    assert directory.read_json(PASSPORT) == expected and directory.read_json_lines("lines.jsonl") == [expected]


def test_what_is_not_there_reads_as_nothing(directory):
    assert directory.read_lines(METRICS) == []
    assert directory.names("checkpoints") == []
    assert not directory.exists(RUN_YAML)


OTHER = CONFIG.replace("0.1", "0.2")
BROADCAST = {"kind": "broadcast", "time": 1.0, "policy_version": 1, "digest": "d"}
HANG = {"kind": "hang", "time": 1.0, "actor": "rollout-0", "silent_s": 9.0}
SCALE = {"kind": "scale", "time": 1.0, "num_workers": 2, "before": 1}
DOING = {"actor": "rollout-0", "phase": "sampling", "since": 1.0, "policy_version": 3}


def test_another_configuration_is_refused_by_the_setting_that_differs(directory):
    directory.claim(CONFIG)
    directory.append_json(EVENTS, BROADCAST)
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate is 0.1 there and 0.2 here.*name another run_dir"):
        directory.check(OTHER)


def test_a_run_that_never_finished_a_step_starts_again_with_anything(directory):
    directory.claim(CONFIG)
    directory.append_line("ledger/ledger.jsonl", "the groups of step 1, which ran out of memory")
    directory.write_file("trajectories/step-000001.arrow", b"")
    directory.write_file("learned/step-000001.arrow", b"")
    for page in ("report.html", "curves.png"):
        directory.write_file(page, b"of another run")
    directory.append_line(VERDICTS, '{"key": "of another judge", "verdict": [[1.0, {}]]}')
    directory.append_json(EVENTS, {"kind": "launched", "time": 1.0, "policy_version": 0})
    for file in ("tensorboard/events.out.tfevents.1.node", "quarantine/step-000001.arrow"):
        directory.write_file(file, b"of another run")
    directory.release()
    directory.check(OTHER)
    assert directory.read_json_lines(EVENTS), "a check removes nothing"
    directory.claim(OTHER)
    assert directory.read_lines(EVENTS) == directory.names("tensorboard") == directory.names("quarantine") == []
    assert directory.read_lines("ledger/ledger.jsonl") == []
    assert directory.names("trajectories") == directory.names("learned") == [] and not directory.exists(VERDICTS)
    assert not directory.exists("report.html") and not directory.exists("curves.png")
    assert yaml.safe_load(directory.read_text(RUN_YAML))["optimizer"] == {"learning_rate": 0.2}


def test_a_run_goes_on_where_an_earlier_version_wrote_a_secret_that_is_hidden_now(directory):
    without_token = {"seed": 1, "environment": {"name": "chat"}}
    written = {"seed": 1, "environment": {"name": "chat", "session_token": "abc"}, "base": "https://me:pass@host"}
    directory.claim(yaml.safe_dump(written))
    directory.append_json(EVENTS, BROADCAST)
    directory.release()
    directory.claim(yaml.safe_dump(hidden(written)))
    assert directory.settings() == hidden(written) != written
    assert directory.read_json_lines(EVENTS), "the run goes on"
    directory.release()
    directory.write_file(RUN_YAML, yaml.safe_dump(written).encode())
    with pytest.raises(ConfigError, match="session_token is '<hidden>' there and None here") as error:
        directory.check(yaml.safe_dump(without_token))
    assert "'abc'" not in str(error.value) and "pass@" not in str(error.value)


def test_a_run_with_a_second_record_has_finished_a_step(directory):
    directory.claim(CONFIG)
    for line in ("one", "two"):
        directory.append_line("ledger/ledger.jsonl", line)
    with pytest.raises(ConfigError, match="belongs to another configuration"):
        directory.check(OTHER)


def test_a_run_with_a_checkpoint_has_finished_a_step_though_its_events_were_lost(directory):
    directory.claim(CONFIG)
    directory.append_line(LEDGER, "the groups of step 1")
    os.makedirs(directory.path("checkpoints/step-000001"))
    with pytest.raises(ConfigError, match="belongs to another configuration"):
        directory.check(OTHER)


def test_a_second_driver_is_refused_while_the_first_lives(directory):
    directory.claim(CONFIG)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
        RunDirectory(directory.url).claim(CONFIG)


@pytest.mark.parametrize("content", [b"", b"- 1", b"seed: {1", b"seed: \xff", b"seed: \0"])
def test_a_run_yaml_that_holds_no_settings_is_named_and_the_run_stays(directory, content):
    directory.claim(CONFIG)
    directory.append_line(LEDGER, "the groups of step 1")
    directory.release()
    directory.write_file(RUN_YAML, content)
    with pytest.raises(DamagedError, match=r"run\.yaml is damaged: it holds no settings; bring it back from a copy"):
        directory.claim(CONFIG)
    assert directory.read_lines(LEDGER) == ["the groups of step 1"] and not directory.is_claimed


def test_a_disk_that_is_full_when_a_run_begins_keeps_no_later_one_out(directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            directory.claim(CONFIG)
    directory.claim(CONFIG)
    assert directory.is_claimed


def test_a_busy_directory_is_refused_by_a_check_already_whatever_else_is_wrong(directory):
    directory.claim(CONFIG)
    directory.append_json(EVENTS, BROADCAST)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
        RunDirectory(directory.url).check(OTHER)


def test_a_driver_of_another_machine_is_alive_as_long_as_it_holds_the_lock(directory):
    directory.claim(CONFIG)
    with open(directory.path("driver.lock"), "w") as file:
        file.write("process 1 on elsewhere")
    other = RunDirectory(directory.url)
    assert other.owner() == "process 1 on elsewhere"
    with pytest.raises(ConfigError, match="in use by process 1 on elsewhere"):
        other.check(CONFIG)
    directory.release()
    directory.write_file("driver.lock", b"process 1 on " + b"elsewhere" * 40)
    assert other.owner() is None
    other.claim(CONFIG)
    assert directory.owner() == lock.this_process(), "nothing of a longer name is left"
    other.release()


def test_an_event_that_could_not_be_written_keeps_neither_lines_nor_the_directory(directory, monkeypatch):
    def refuse():
        raise StorageError("busy")

    compacted = []
    directory.claim("seed: 1")
    monkeypatch.setattr(directory, "compact_lines", lambda: compacted.append(directory.is_claimed))
    directory.writer.put(refuse)
    with pytest.raises(StorageError, match="busy"):
        directory.release()
    assert compacted == [True] and directory.owner() is None


def test_a_look_at_the_owner_does_not_refuse_a_claim(directory, monkeypatch):
    """A look takes the lock for an instant."""
    directory.write_file("driver.lock", b"")
    with open(directory.path("driver.lock")) as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: look.close())
        directory.claim(CONFIG)


def test_nobody_else_on_the_machine_reads_a_run(directory):
    directory.claim(CONFIG)
    assert os.stat(directory.path()).st_mode & 0o777 == 0o700


def test_a_claim_that_is_refused_leaves_the_directory_free(directory):
    directory.claim(CONFIG)
    directory.append_json(EVENTS, BROADCAST)
    directory.release()
    other = RunDirectory(directory.url)
    with pytest.raises(ConfigError, match="belongs to another configuration"):
        other.claim(OTHER)
    assert directory.owner() is None
    directory.claim(CONFIG)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space, then start the same command again"),
        (errno.EACCES, "fix its permissions, then start the same command again"),
        (errno.EIO, "mend that, then start the same command again"),
    ],
)
def test_a_disk_error_says_what_helps(directory, monkeypatch, number, advice):
    def failing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match=rf"run\.yaml: {os.strerror(number)}; {advice}$"):
        directory.write_file(RUN_YAML, b"")


def test_a_missing_file_is_missing_and_the_disk_is_not_full(directory):
    with pytest.raises(StorageError, match=r"a\.arrow: .*it is missing: check the path") as missing:
        directory.read_file("trajectories/a.arrow")
    assert "free space" not in str(missing.value)


def test_a_dead_drivers_claim_is_taken_over(directory):
    script = (
        "import os; from cluster.record.run_directory import RunDirectory; "
        f"RunDirectory({directory.url!r}).claim({CONFIG!r}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert directory.exists("driver.lock")
    assert directory.owner() is None
    directory.claim(CONFIG)


def test_a_torn_last_line_is_cut_when_a_run_goes_on(directory):
    directory.write_file(EVENTS, b'{"kind": "a", "time": 1.0}\n{"kind": "b')
    assert directory.read_json_lines(EVENTS) == [{"kind": "a", "time": 1.0}]
    directory.claim(CONFIG)
    directory.append_json(EVENTS, {"kind": "c", "time": 2.0})
    assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["a", "c"]


def test_a_last_line_may_be_torn_within_a_character(directory):
    directory.write_file(EVENTS, '{"kind": "数"}\n{"kind": "数'.encode()[:-1])
    assert directory.read_lines(EVENTS) == ['{"kind": "数"}', ""]
    directory.claim(CONFIG)
    assert directory.read_file(EVENTS).to_pybytes() == '{"kind": "数"}\n'.encode()


def test_a_run_goes_on_at_once_however_many_lines_it_has(directory):
    """A terabyte of them, and the last one is whole. Seen before: all were read, into twice their memory."""
    directory.make()
    with open(directory.path(PHASES), "wb") as lines:
        lines.seek(2**40)
        lines.write(b"\n")
    directory.claim(CONFIG)
    assert directory.size_bytes(PHASES) == 2**40 + 1


def test_what_a_killed_process_wrote_aside_is_gone_when_a_run_goes_on_and_what_may_be_a_living_ones_stays(directory):
    for number in (1, 2):
        directory.write_file(f"trajectories/step-000003.arrow.tmp-{number}", b"half")
    os.utime(directory.path("trajectories/step-000003.arrow.tmp-1"), (0, 0))
    directory.claim(CONFIG)
    assert directory.names("trajectories") == ["step-000003.arrow.tmp-2"]


def test_a_broken_line_in_the_middle_is_an_error(directory):
    directory.write_file(EVENTS, b'{"kind"\n{"kind": "b"}\n')
    with pytest.raises(
        DamagedError, match=r"events\.jsonl line 1 is not JSON: .*; take that line out, or bring the file"
    ):
        directory.read_json_lines(EVENTS)


def test_a_line_that_holds_no_object_is_named(directory):
    """Seen before: its reader ended with an error of Python's."""
    directory.write_file(EVENTS, b'{"kind": "a"}\n7\n{"kind": "b"}\n')
    with pytest.raises(DamagedError, match=r"events\.jsonl line 2 holds no object; take that line out"):
        directory.read_json_lines(EVENTS)


@pytest.mark.parametrize("content", [b'{"seed": ', b"\xff", b"[1]"])
def test_a_file_that_holds_no_object_is_named(directory, content):
    """Seen before: half a passport, of a copy that was broken off, ended `passport diff` and `report` with a traceback."""
    directory.write_file(PASSPORT, content)
    with pytest.raises(DamagedError, match=r"passport\.json is damaged: .*; bring it back from a copy"):
        directory.read_json(PASSPORT)


def test_a_file_of_lines_with_damaged_bytes_is_named(directory):
    for name in (EVENTS, LEDGER):
        directory.write_file(name, b'{"kind": "a"}\n{"kind": "\xff"}\n{"kind": "b"}\n')
    with pytest.raises(DamagedError, match=r"events\.jsonl was damaged: .*0xff.* bring it back from a copy"):
        directory.read_json_lines(EVENTS)
    with pytest.raises(StorageError, match=r"ledger\.jsonl was damaged"):
        Ledger(directory)


def test_a_full_disk_is_named_and_leaves_the_old_file(directory, monkeypatch):
    directory.write_file("passport.json", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"passport\.json: No space left on device; free space"):
        directory.write_file("passport.json", b"new")
    monkeypatch.undo()
    assert directory.read_text("passport.json") == "old"
    assert directory.names() == ["passport.json"]


def test_lines_that_were_not_durable_are_after_a_flush_and_a_disk_that_refuses_is_asked_again(directory, monkeypatch):
    synced = []

    def full(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for _ in range(2):
        directory.append_json(EVENTS, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"events\.jsonl: Input/output error"):
        directory.flush_lines()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    directory.flush_lines()
    directory.flush_lines()
    assert synced == [directory.path(EVENTS)]


def test_a_line_that_is_written_while_others_are_synced_is_synced_by_the_next_flush(tmp_path, monkeypatch):
    """Seen before: it was taken for one of those that were synced, and a power cut could take it from under a checkpoint."""
    files, synced = LocalFiles(str(tmp_path)), []

    class Late(str):
        def __format__(self, spec: str) -> str:  # as a flush in another thread comes just before the line is written
            files.flush()
            return str(self)

    files.append(EVENTS, "{}", is_durable=False)
    files.append(EVENTS, Late("{}"), is_durable=False)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.flush()
    assert synced == [files.path(EVENTS)]


def test_all_of_a_file_is_with_the_system_when_it_is_synced(tmp_path, monkeypatch):
    def note(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            synced.append((os.path.basename(path).partition(".tmp")[0], os.fstat(descriptor).st_size))

    files, synced = LocalFiles(str(tmp_path / "run")), []
    (tmp_path / "source").write_bytes(b"abc")
    monkeypatch.setattr(os, "fsync", note)
    files.write("a", b"abc")
    files.upload("b", str(tmp_path / "source"))
    files.download("a", str(tmp_path / "c"))
    assert synced == [("a", 3), ("b", 3), ("c", 3)]
    synced.clear()
    sync_files(tmp_path / "run")
    assert sorted(synced) == [("a", 3), ("b", 3)]


def test_of_a_line_of_which_a_disk_takes_a_part_nothing_stays(tmp_path):
    files = LocalFiles(str(tmp_path))
    files.append(EVENTS, "abc", is_durable=False)
    with largest_file(6), pytest.raises(StorageError, match="No space left on device"):
        files.append(EVENTS, "def", is_durable=False)
    assert files.read(EVENTS).to_pybytes() == b"abc\n"


@pytest.mark.parametrize("piece_bytes", [3, 1 << 20])
def test_the_last_lines_of_a_long_file_are_replaced_in_whole_or_not_at_all(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(local_files, "_PIECE_BYTES", piece_bytes)
    directory, file = RunDirectory(str(tmp_path)), tmp_path / METRICS
    file.write_bytes("eins\nzwei\ndrei\nfünf\n".encode() + b"f\xc3")  # torn within a character
    assert directory.read_last_lines(METRICS, 2) == ["drei", "fünf"]
    before = file.read_bytes()
    with largest_file(len(before)), pytest.raises(StorageError, match=r"metrics\.jsonl: File too large"):
        directory.replace_last_lines(METRICS, 2, ["too long a line"])
    assert file.read_bytes() == before and directory.names() == [METRICS]
    directory.replace_last_lines(METRICS, 2, ["vier", "fünf", "sechs"])
    assert file.read_text(encoding="utf-8") == "eins\nzwei\nvier\nfünf\nsechs\n"
    directory.replace_last_lines(METRICS, 9, [])
    assert file.read_bytes() == b""


def test_last_lines_that_were_replaced_outlast_a_power_cut(tmp_path, monkeypatch):
    (tmp_path / METRICS).write_text("a\nb\n")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    LocalFiles(str(tmp_path)).replace_last(METRICS, 1, "c\n")
    assert synced == [f"{tmp_path}/{METRICS}.tmp-{os.getpid()}", str(tmp_path)]


@pytest.mark.parametrize(
    "write",
    [
        lambda files: files.append("a/b/c", "{}", is_durable=True),
        lambda files: files.append("a/b/c", "{}", is_durable=False),
        lambda files: files.write("a/b/c", b""),
    ],
    ids=["durable line", "line", "file"],
)
def test_the_names_of_a_new_file_and_its_new_folders_outlast_a_power_cut(tmp_path, monkeypatch, write):
    """Seen in review: the ledger's first record was synced, and the names of its file and folder were not."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write(LocalFiles(str(tmp_path)))
    assert {str(tmp_path / folder) for folder in ("", "a", "a/b")} <= {*synced}


def test_the_name_of_a_run_outlasts_a_power_cut(tmp_path, monkeypatch):
    """Seen in review: all that was in its folder was synced, and the names of the folder and of the one above it were not."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    directory = RunDirectory(str(tmp_path / "runs" / "mine"))
    directory.make()
    assert synced == [str(tmp_path), str(tmp_path / "runs")]
    assert os.stat(directory.path()).st_mode & 0o777 == 0o700 != os.stat(tmp_path / "runs").st_mode & 0o777


def test_an_unknown_store_is_refused():
    with pytest.raises(ConfigError, match=r"use a local path, or s3://, gs:// or az:// with the name of a bucket$"):
        RunDirectory("ftp://somewhere/run")


def test_a_place_that_cannot_be_written_is_refused_by_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run/deeper"):
        with pytest.raises(
            ConfigError, match=rf"^run_dir='.*/{name}' cannot be written: .*/file is no folder; name another"
        ):
            RunDirectory(str(tmp_path / name)).check(CONFIG)
    (tmp_path / "run" / "driver.lock").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"/run' cannot be written: Is a directory; mend that, or name another run_dir$"
    ):
        RunDirectory(str(tmp_path / "run")).claim(CONFIG)


def test_looking_at_files_names_the_one_that_the_disk_refuses(tmp_path):
    (tmp_path / "driver.lock").mkdir()
    directory = RunDirectory(str(tmp_path))
    for look, path in ((directory.owner, "driver.lock"), (lambda: directory.names("x" * 300), "x" * 300)):
        with pytest.raises(StorageError, match=rf"{path}: .*mend that, then start the same command again"):
            look()


def test_removing_what_is_not_there_is_done(directory):
    directory.write_file("control.json", b"{}")
    for _ in range(2):
        directory.remove("control.json")
    assert not directory.exists("control.json")


@pytest.mark.parametrize("name", ["$SCRATCH/a", "a/${USER}"])
def test_a_variable_that_no_shell_replaced_makes_no_folder_of_its_name(name, tmp_path):
    with pytest.raises(
        ConfigError, match=r"run_dir=.*\$.* names a variable, which only a shell replaces; write its value"
    ):
        RunDirectory(str(tmp_path / name)).check_place()
    (tmp_path / name).mkdir(parents=True)
    RunDirectory(str(tmp_path / name)).check_place()


def test_a_place_in_rays_copy_of_a_jobs_folder_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    (copy / "shared").symlink_to(tmp_path)
    monkeypatch.chdir(copy)
    with pytest.raises(
        ConfigError, match=r"run_dir='runs/mine' lies in a job's copy of its folder, which Ray removes; name an abs"
    ):
        RunDirectory("runs/mine").check_place()
    RunDirectory("shared/mine").check_place()
    RunDirectory(str(tmp_path / "mine")).check_place()


@pytest.mark.parametrize("empty", ["", " ", "a\0b"])
def test_an_empty_name_is_not_the_current_folder(empty):
    """Seen before: with `run_dir: ${OUT}` and an unset OUT the run's files came into the folder where the command ran."""
    with pytest.raises(ConfigError, match=r"names no folder; name one, or '\.' for the current"):
        RunDirectory(empty)


@pytest.mark.parametrize(
    ("file", "line", "why"),
    [
        (METRICS, {"time": 1.0}, "has no 'policy_version'"),
        (METRICS, {"policy_version": 1}, "has no 'time'"),
        (METRICS, {"policy_version": 1.5, "time": 1.0}, "has policy_version=1.5, which is not a whole number"),
        (METRICS, {"policy_version": 1, "time": None}, "has time=None, which is not a number"),
        (METRICS, {"policy_version": 1, "time": 1.0, "a/b": [1]}, "has a/b=[1], which is not a number or null"),
        (EVENTS, {"time": 1.0}, "has no 'kind'"),
        (EVENTS, {"kind": "finished"}, "has no 'time'"),
        (EVENTS, {"kind": "failed", "time": 1.0}, "has no 'reason'"),
        (EVENTS, {"kind": "worker_left", "time": 1.0, "actor": None}, "has actor=None, which is not a text"),
        (EVENTS, {"kind": "reward_failure", "time": 1.0, "failures": [7]}, "has failures[0]=7, which is not an object"),
        (EVENTS, {"kind": 1, "time": 1.0}, "has kind=1, which is not a text"),
        (EVENTS, HANG | {"silent_s": "long"}, "has silent_s='long', which is not a number"),
        (EVENTS, {"kind": "started", "time": 1.0, "actors": ["a"]}, "has actors=['a'], which is not an object"),
        (EVENTS, SCALE | {"actors": {"a": 1}}, "has actors={'a': 1}, which is not a text"),
        (PHASES, {"actor": "a", "phase": "b", "start": 1.0}, "has no 'end'"),
        (PHASES, {"actor": "a", "phase": 1, "start": 1.0, "end": 2.0}, "has phase=1, which is not a text"),
        (VERDICTS, {"key": "a"}, "has no 'verdict'"),
        (VERDICTS, {"key": 1, "verdict": 0.5}, "has key=1, which is not a text"),
    ],
)
def test_a_line_with_which_no_reader_can_compute_is_named(file, line, why, tmp_path):
    """Seen before: `verify`, `info`, `trace`, `report` and `view` ended with Python's own errors."""
    good = {
        "policy_version": 1,
        "time": 1.0,
        "kind": "a",
        "actor": "a",
        "phase": "b",
        "start": 1.0,
        "end": 2.0,
        "key": "a",
        "verdict": 0.5,
    }
    whole = {name: value for name, value in good.items() if file != METRICS or name in ("policy_version", "time")}
    directory = RunDirectory(str(tmp_path))
    directory.replace_lines(file, [json.dumps(whole), json.dumps(line)])
    with pytest.raises(DamagedError, match=rf"{file} line 2 {re.escape(why)}; take that line out, or bring the file"):
        directory.read_json_lines(file)


@pytest.mark.parametrize(
    "kind", ["failure", "hang", "recovery", "worker_joined", "worker_left", "worker_not_joined", "attested"]
)
def test_an_event_of_an_actor_names_it(kind, directory):
    """Seen before: pages of the viewer, `report` and `trace` ended with Python's own errors."""
    facts = {"failure": "death", "decision": "restart", "silent_s": 1.0, "seconds": 1.0}
    line = {"kind": kind, "time": 1.0, "actor": "rollout-0", **facts}
    directory.append_json(EVENTS, line)
    assert directory.read_json_lines(EVENTS) == [line]
    directory.append_json(EVENTS, {name: value for name, value in line.items() if name != "actor"})
    with pytest.raises(DamagedError, match=r"events\.jsonl line 2 has no 'actor'; take that line out"):
        directory.read_json_lines(EVENTS)


@pytest.mark.parametrize("missing", ["kind", "message", "count"])
def test_each_failure_of_a_reward_has_a_kind_a_message_and_a_number(missing, directory):
    failures = [{"kind": "KeyError", "message": "KeyError: 'a'", "count": number} for number in (1, 2)]
    line = {"kind": "reward_failure", "time": 1.0, "failures": failures}
    directory.append_json(EVENTS, line)
    assert directory.read_json_lines(EVENTS) == [line]
    del failures[1][missing]
    directory.append_json(EVENTS, line)
    with pytest.raises(DamagedError, match=rf"events\.jsonl line 2 has no 'failures\[1\]\.{missing}'; take that line"):
        directory.read_json_lines(EVENTS)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "worker_joined", "time": 1.0, "actor": "rollout-0"},
        {"kind": "scale", "time": 1.0, "num_workers": 2, "before": 1},
        {"kind": "recorded", "time": 1.0, "num_groups": 8},
        {"kind": "reward_failure", "time": 1.0},
        {"kind": "of a later version", "time": 1.0},
    ],
)
def test_an_event_of_another_version_may_lack_fields_that_this_one_writes(line, directory):
    directory.append_json(EVENTS, line)
    assert directory.read_json_lines(EVENTS) == [line]


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"actors": []}, "has no 'time'"),
        ({"time": 1.0}, "has no 'actors'"),
        ({"time": 1.0, "actors": None}, "has actors=None, which is not a list"),
        ({"time": 1.0, "actors": [DOING, "a"]}, "has actors[1]='a', which is not an object"),
        (
            {"time": 1.0, "actors": [DOING, {"actor": "a", "phase": "b", "since": 1.0}]},
            "has no 'actors[1].policy_version'",
        ),
        ({"time": 1.0, "actors": [DOING | {"since": "now"}]}, "has actors[0].since='now', which is not a number"),
    ],
)
def test_a_status_with_which_no_reader_can_compute_is_named(status, why, directory):
    """Seen before: `info` ended with Python's own error."""
    assert directory.read_json(STATUS) == {}
    directory.write_json(STATUS, {"time": 1.0, "actors": [DOING]})
    assert directory.read_json(STATUS)["actors"] == [DOING]
    directory.write_json(STATUS, status)
    with pytest.raises(DamagedError, match=rf"status\.json {re.escape(why)}; remove the file, or bring it back from a"):
        directory.read_json(STATUS)

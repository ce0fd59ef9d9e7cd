import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.contracts.errors import CheckpointError, StorageError
from cluster.record.storage import Storage
from learner.checkpoint.manifest import FORMAT, FileEntry, Manifest, state_name
from learner.checkpoint.places import Place
from learner.checkpoint.reading import checkpoints, read_manifest, superfluous, verify, verify_model
from learner.checkpoint.states import States
from learner.checkpoint.targets import FolderTarget
from learner.checkpoint.writing import (
    aside_of,
    begin,
    commit,
    discard,
    place,
    prune,
    remove_unfinished,
    saving,
    write_tensors,
)
from tests.unit.learner.disk import largest_file


def _save(
    directory: Path,
    *,
    metric: float | None = None,
    rated_by: str = "",
    parameters: str = "p",
    base: str = "",
    version: str = FORMAT,
) -> Path:
    aside = begin(directory)
    files = {state_name(0, 1): write_tensors(aside / state_name(0, 1), {"weight/w": torch.arange(4.0)}, in_blocks=True)}
    manifest = Manifest(
        format=version,
        policy_version=1,
        num_ranks=1,
        parameters_digest=parameters,
        base=base,
        metric=metric,
        rated_by=rated_by,
        learner={},
        extra={"a": 1},
        files={},
    )
    commit(aside, directory, manifest.sealed(files))
    return directory


def test_what_is_written_is_verified_and_read(tmp_path: Path):
    directory = _save(tmp_path / "step-000001")
    manifest = verify(Place.of(directory))
    assert manifest == read_manifest(Place.of(directory), expected_parameters="p") and manifest.extra == {"a": 1}
    assert States(Place.of(directory), manifest).rows("weight/w").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_first_checkpoint_and_an_exported_folder_outlast_a_power_cut_with_their_names(tmp_path: Path, monkeypatch):
    """Seen in review: what was in them was synced, and not the name of the run's folder of checkpoints, nor that of what was exported."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    root = tmp_path / "checkpoints"
    _save(root / "step-000001")
    aside = aside_of(root / "step-000001")
    assert synced == [str(each) for each in (tmp_path, aside / state_name(0, 1), aside / "manifest.json", aside, root)]
    synced.clear()
    place(begin(tmp_path / "exported"), tmp_path / "exported")
    assert (tmp_path / "exported").is_dir() and synced == [str(aside_of(tmp_path / "exported")), str(tmp_path)]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is torn"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "was altered"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_offered(tmp_path: Path, damage, says: str):
    _save(tmp_path / "step-000001")
    directory = _save(tmp_path / "step-000002")
    damage(directory / state_name(0, 1))
    with pytest.raises(CheckpointError, match=says) as error:
        verify(Place.of(directory))
    assert (
        "step-000002" in str(error.value)
        and "the one before it is" in str(error.value)
        and "step-000001" in str(error.value)
    )


def test_the_one_before_the_millionth_is_the_one_of_the_step_before(tmp_path: Path):
    """Their names are of different lengths: by the alphabet the millionth comes first."""
    for step in (999_999, 1_000_000):
        (_save(tmp_path / f"step-{step:06d}") / state_name(0, 1)).unlink()
    with pytest.raises(CheckpointError, match=r"step-999999 is torn.*; there is none before it"):
        verify(Place.of(tmp_path / "step-999999"))
    with pytest.raises(
        CheckpointError, match=r"step-1000000 is torn.*; the one before it is .*step-999999: move step-1000000"
    ):
        verify(Place.of(tmp_path / "step-1000000"))


@pytest.mark.parametrize(("written", "altered"), [('"policy_version":1', '"policy_version":2'), ('"a":1', '"a":3')])
def test_an_altered_manifest_is_refused(tmp_path: Path, written: str, altered: str):
    directory = _save(tmp_path / "step-000001")
    text = (directory / "manifest.json").read_text().replace(": ", ":")
    assert written in text
    (directory / "manifest.json").write_text(text)
    verify(Place.of(directory))
    (directory / "manifest.json").write_text(text.replace(written, altered))
    with pytest.raises(CheckpointError, match=r"was altered: manifest\.json has another digest"):
        verify(Place.of(directory))


def test_the_best_of_altered_checkpoints_is_unknown_and_fails_no_save(tmp_path: Path):
    for step in (1, 2):
        _save(tmp_path / f"step-{step:06d}", metric=0.5)
    (tmp_path / "step-000001" / "manifest.json").write_text("{}")
    prune(tmp_path, keep_last=1, keep_best=True)
    assert [path.name for path in checkpoints(Storage(str(tmp_path)))] == ["step-000002"]


@pytest.mark.parametrize("there", [None, b"a part"])
def test_ranks_that_do_not_share_the_directory_save_nothing(tmp_path: Path, there: bytes | None):
    """Two machines with a disk each: the first rank's folder has its own files alone. The last good checkpoint stands."""
    standing, directory = _save(tmp_path / "step-000001"), tmp_path / "step-000002"
    target = FolderTarget(str(directory), is_first=True, save_id="a")
    manifest = read_manifest(Place.of(standing))
    target.begin(manifest)
    own, others = state_name(0, 2), state_name(1, 2)
    files = {
        name: write_tensors(target.folder() / name, {"weight/w": torch.arange(4.0)}, in_blocks=True)
        for name in (own, others)
    }
    (target.folder() / others).unlink()
    if there is not None:
        (target.folder() / others).write_bytes(there)
    with pytest.raises(CheckpointError, match=rf"wrote {others}, .* the machines do not share run_dir; mount one file"):
        target.commit(manifest.sealed(files))
    target.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json; there is none before it"):
        verify(Place.of(tmp_path / "step-000001"))


def test_another_models_checkpoint_is_foreign(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is foreign"):
        read_manifest(Place.of(_save(tmp_path / "step-000001")), expected_parameters="q")


def test_the_bases_of_adapters_are_compared_one_by_one(tmp_path: Path):
    """The policy's and the critic's. A checkpoint of an older version has the policy's alone."""
    old, new = (Place.of(_save(tmp_path / name, base=name)) for name in ("p1", "p1+c1"))
    for saved, base in ((old, "p1+c1"), (new, "p1+c1"), (new, "+c1"), (new, "")):
        read_manifest(saved, expected_parameters="p", expected_base=base)
    for saved, base, setting in ((old, "p2+c1", "model"), (new, "p2+c1", "model"), (new, "p1+c2", "algorithm.value")):
        with pytest.raises(CheckpointError, match=f"other weights than {setting}.path has now"):
            read_manifest(saved, expected_parameters="p", expected_base=base)


def test_another_versions_checkpoint_is_not_restored_and_its_weights_may_begin_a_run(tmp_path: Path):
    directory = _save(tmp_path / "step-000001", version="treadwheel-checkpoint-2")
    with pytest.raises(
        CheckpointError, match=r"written by another version of treadwheel, in format 'treadwheel-ch.*-2'"
    ) as error:
        read_manifest(Place.of(directory), expected_parameters="p")
    assert f"model.path={directory}/model" in str(error.value)
    verify(Place.of(directory))
    verify_model(directory / "model")


def test_a_checkpoint_of_a_version_that_says_more_is_of_another_version_and_not_altered(tmp_path: Path):
    """Seen in review: its manifest was called altered, and the one before it was offered."""
    manifest = _save(tmp_path / "step-000001", version="treadwheel-checkpoint-99") / "manifest.json"
    manifest.write_text(manifest.read_text().replace("{", '{"sealed_by": "a later version",', 1))
    with pytest.raises(
        CheckpointError, match=r"another version of treadwheel, in format 'treadwheel-ch.*-99'.*; go on with"
    ):
        verify(Place.of(tmp_path / "step-000001"))


def test_a_manifest_of_the_version_before_has_its_digest_still():
    """Its weights may begin a run, and its files had no blocks."""
    entry = FileEntry(size_bytes=4, sha256="ab")
    assert entry.model_dump_json() == '{"size_bytes":4,"sha256":"ab"}'
    assert FileEntry.model_validate_json(entry.model_dump_json()) == entry


def test_a_save_that_was_killed_leaves_no_checkpoint_and_is_cleared_away(tmp_path: Path):
    aside = begin(tmp_path / "step-000001")
    (aside / "half").write_text("x")
    assert checkpoints(Storage(str(tmp_path))) == []
    assert list(begin(tmp_path / "step-000001").iterdir()) == []


def test_a_full_disk_is_named_and_leaves_the_last_one(tmp_path: Path):
    _save(tmp_path / "step-000001")
    aside = begin(tmp_path / "step-000002")
    with (
        largest_file(1000),
        pytest.raises(CheckpointError, match=r"step-000002 was not saved: .*the last good one stands"),
        saving(tmp_path / "step-000002"),
    ):
        write_tensors(aside / "state", {"w": torch.zeros(2**16)})
    discard(aside)
    verify(checkpoints(Storage(str(tmp_path)))[-1])


def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.2], start=1):
        _save(tmp_path / f"step-{step:06d}", metric=metric)
    prune(tmp_path, keep_last=2, keep_best=True)
    assert [path.name for path in checkpoints(Storage(str(tmp_path)))] == ["step-000002", "step-000004", "step-000005"]
    prune(tmp_path, keep_last=1, keep_best=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_the_best_one_stays_when_the_run_is_resumed_and_rates_in_another_way(tmp_path: Path):
    """Seen in review: harder held-out prompts made all later checkpoints worse than an early one."""
    ratings = [("reward", 0.9), ("evaluation a", 0.3), ("evaluation a", 0.2), ("reward", 0.8), ("evaluation b", 0.1)]
    for step, (rated_by, metric) in enumerate(ratings, start=1):
        _save(tmp_path / f"step-{step:06d}", metric=metric, rated_by=rated_by)
    prune(tmp_path, keep_last=1, keep_best=True)
    assert [place.name for place in checkpoints(Storage(str(tmp_path)))] == [
        "step-000001",
        "step-000002",
        "step-000005",
    ]


def test_a_best_one_that_cannot_be_read_for_a_moment_stays_and_the_save_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step, metric in enumerate([0.9, 0.1, 0.2], start=1):
        _save(tmp_path / f"step-{step:06d}", metric=metric)
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "read_text", _failing_for("step-000001", Storage.read_text))
        with pytest.raises(StorageError, match="Input/output error"):
            superfluous(Storage(str(tmp_path)), keep_last=1, keep_best=True)
        prune(tmp_path, keep_last=1, keep_best=True)
    assert len(checkpoints(Storage(str(tmp_path)))) == 3
    prune(tmp_path, keep_last=1, keep_best=True)
    assert [place.name for place in checkpoints(Storage(str(tmp_path)))] == ["step-000001", "step-000003"]


def test_an_old_one_that_cannot_be_removed_stays_and_the_save_stands(tmp_path: Path):
    """Seen in review: a checkpoint that an administrator had protected, and every later save was said to have failed."""
    for step in (1, 2, 3):
        _save(tmp_path / f"step-{step:06d}")
    (tmp_path / ".step-000001.removing").write_text("no folder can take this name")
    prune(tmp_path, keep_last=1, keep_best=False)
    assert [place.name for place in checkpoints(Storage(str(tmp_path)))] == ["step-000001", "step-000003"]


def _failing_for(checkpoint: str, whole: Callable[[Storage, str], str]) -> Callable[[Storage, str], str]:
    def read_text(storage: Storage, name: str) -> str:
        if name.startswith(checkpoint):
            raise StorageError(f"{name}: Input/output error")
        return whole(storage, name)

    return read_text


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seen in review: it was renamed first, and the next save removed it."""
    directory = _save(tmp_path / "step-000001", metric=0.5)
    rename = os.rename

    def failing(old: Path, new: Path) -> None:
        if old == aside_of(directory):
            raise OSError("Input/output error")
        rename(old, new)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output error"):
        patched.setattr(os, "rename", failing)
        _save(directory, metric=0.7)
    assert verify(Place.of(directory)).metric == 0.5


def test_a_checkpoint_whose_replacement_was_killed_gets_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = _save(tmp_path / "step-000001", metric=0.5)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", _killed_after(1, os.rename))
        _save(directory, metric=0.7)
    assert not directory.exists()
    remove_unfinished(tmp_path)
    _save(tmp_path / "step-000002")
    prune(tmp_path, keep_last=2, keep_best=False)
    assert verify(Place.of(directory)).metric == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_replaced_checkpoint_that_is_not_removed_yet_does_not_come_back(tmp_path: Path):
    directory = _save(tmp_path / "step-000001", metric=0.7)
    (tmp_path / ".step-000001.replaced").mkdir()
    prune(tmp_path, keep_last=1, keep_best=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"] and verify(Place.of(directory)).metric == 0.7


def test_a_replaced_checkpoint_that_cannot_get_its_name_back_yet_is_not_removed(tmp_path: Path, monkeypatch):
    directory = _save(tmp_path / "step-000001", metric=0.5)
    directory.rename(tmp_path / ".step-000001.replaced")

    def failing(old: Path, new: Path) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        prune(tmp_path, keep_last=1, keep_best=False)
    prune(tmp_path, keep_last=1, keep_best=False)
    assert verify(Place.of(directory)).metric == 0.5


def test_an_unfinished_save_is_renamed_before_it_is_removed_and_one_that_cannot_be_stays(tmp_path: Path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f".step-{step:06d}.saving").mkdir()
    (tmp_path / "..step-000001.saving.removing").write_text("no folder can take this name")
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **how: removed.append(folder.name))
    remove_unfinished(tmp_path)
    assert set(removed) == {f"..step-{step:06d}.saving.removing" for step in (1, 2)}
    assert (tmp_path / ".step-000001.saving").is_dir()


def test_a_checkpoint_is_replaced_where_a_killed_save_left_the_one_that_it_replaced(tmp_path: Path):
    directory = _save(tmp_path / "step-000001", metric=0.5)
    _save(tmp_path / "left", metric=0.3).rename(tmp_path / ".step-000001.replaced")
    _save(directory, metric=0.7)
    assert verify(Place.of(directory)).metric == 0.7


def _killed_after(num_times: int, work: Callable[..., None]) -> Callable[..., None]:
    done: list[None] = []

    def killed(*args: Any) -> None:
        if len(done) == num_times:
            raise KeyboardInterrupt
        done.append(work(*args))

    return killed


class _Save:
    """A save by one rank. All saves have files of the same names and sizes."""

    def __init__(self, directory: Path, *, value: float) -> None:
        self._value, self._name = value, state_name(0, 1)
        self._manifest = Manifest(
            policy_version=1, num_ranks=1, parameters_digest="p", metric=None, learner={}, extra={}, files={}
        )
        self.target = FolderTarget(str(directory), is_first=True, save_id=f"save-{value:g}")

    def begin(self) -> None:
        self.target.begin(self._manifest)

    def write(self) -> None:
        tensors = {"weight/w": torch.full((4,), self._value)}
        entry = write_tensors(self.target.folder() / self._name, tensors, in_blocks=True)
        self._manifest = self._manifest.sealed({self._name: entry})

    def commit(self) -> None:
        self.target.commit(self._manifest)
        self.target.prune(keep_last=1, keep_best=False)
        self.target.close()

    def fail(self) -> None:
        with pytest.raises(CheckpointError, match="was not saved: a save that began later removed its files"):
            self.target.commit(self._manifest)
        self.target.abandon()
        self.target.close()


def _saved_value(directory: Path) -> float:
    place = Place.of(directory)
    return States(place, verify(place)).rows("weight/w")[0].item()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_save_of_ranks_that_were_given_up_makes_no_checkpoint_of_the_files_of_their_successors(
    tmp_path: Path, is_late: bool
):
    """Seen in review: both wrote into one folder, and the first one gave the files of the second its own manifest."""
    directory = tmp_path / "step-000001"
    given_up, successor = _Save(directory, value=1), _Save(directory, value=2)
    given_up.begin()
    given_up.write()
    successor.begin()
    successor.write()
    for each in (successor.commit, given_up.fail) if is_late else (given_up.fail, successor.commit):
        each()
    assert _saved_value(directory) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_save_of_ranks_that_were_given_up_whose_files_are_all_its_own_is_a_whole_checkpoint(tmp_path: Path):
    """It wrote nothing before its successors began."""
    directory = tmp_path / "step-000001"
    given_up, successor = _Save(directory, value=1), _Save(directory, value=2)
    given_up.begin()
    successor.begin()
    given_up.write()
    given_up.commit()
    assert _saved_value(directory) == 1.0
    successor.write()
    successor.commit()
    assert _saved_value(directory) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_save_of_a_process_that_was_killed_is_no_checkpoint_and_its_files_go_before_the_next_one_writes(
    tmp_path: Path, step: int
):
    """Otherwise a disk that has room for no more than one save would take none."""
    killed = _Save(tmp_path / f"step-{step:06d}", value=1)
    killed.begin()
    killed.write()
    (tmp_path / ".step-000004.saving").mkdir()  # of an earlier version of treadwheel
    (tmp_path / ".step-000000.removing").mkdir()
    assert checkpoints(Storage(str(tmp_path))) == []
    following = _Save(tmp_path / "step-000002", value=2)
    following.begin()
    assert list(tmp_path.iterdir()) == [following.target.folder()]
    following.write()
    following.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_checkpoints_are_in_the_order_of_their_steps_and_other_folders_are_none(tmp_path: Path):
    for name in ("step-999999", "step-1000000", "step-000020.bad", ".step-000030.saving", "notes"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(Storage(str(tmp_path)))] == ["step-999999", "step-1000000"]
    assert [path.name for path in checkpoints(Storage(str(tmp_path)), newest=999_999)] == ["step-999999"]

from pathlib import Path

import pytest
import torch

from cluster.contracts.errors import CheckpointError
from learner.checkpoint import files as checkpoint
from learner.checkpoint.files import (
    FORMAT,
    Manifest,
    States,
    begin,
    checkpoints,
    commit,
    prune,
    saving,
    state_name,
    verify,
    verify_model,
    write_tensors,
)
from tests.unit.learner.disk import largest_file


def _save(directory: Path, *, metric: float | None = None, parameters: str = "p", version: str = FORMAT) -> Path:
    aside = begin(directory)
    files = {state_name(0, 1): write_tensors(aside / state_name(0, 1), {"weight/w": torch.arange(4.0)})}
    manifest = Manifest(
        format=version,
        policy_version=1,
        num_ranks=1,
        parameters_digest=parameters,
        metric=metric,
        learner={},
        extra={"a": 1},
        files={},
    )
    commit(aside, directory, manifest.sealed(files))
    return directory


def test_what_is_written_is_verified_and_read(tmp_path: Path):
    directory = _save(tmp_path / "step-000001")
    manifest = verify(directory, expected_parameters="p")
    assert manifest.extra == {"a": 1}
    assert checkpoint.States(directory, num_ranks=manifest.num_ranks).tensor("weight/w").tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


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
        verify(directory)
    assert (
        "step-000002" in str(error.value)
        and "the one before it is" in str(error.value)
        and "step-000001" in str(error.value)
    )


@pytest.mark.parametrize(("written", "altered"), [('"policy_version":1', '"policy_version":2'), ('"a":1', '"a":3')])
def test_an_altered_manifest_is_refused(tmp_path: Path, written: str, altered: str):
    directory = _save(tmp_path / "step-000001")
    text = (directory / "manifest.json").read_text().replace(": ", ":")
    assert written in text
    (directory / "manifest.json").write_text(text)
    verify(directory)
    (directory / "manifest.json").write_text(text.replace(written, altered))
    with pytest.raises(CheckpointError, match=r"was altered: manifest\.json has another digest"):
        verify(directory)


def test_the_best_of_altered_checkpoints_is_unknown_and_fails_no_save(tmp_path: Path):
    for step in (1, 2):
        _save(tmp_path / f"step-{step:06d}", metric=0.5)
    (tmp_path / "step-000001" / "manifest.json").write_text("{}")
    prune(tmp_path, keep_last=1, keep_best=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json; there is none before it"):
        verify(tmp_path / "step-000001")


def test_another_models_checkpoint_is_foreign(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is foreign"):
        verify(_save(tmp_path / "step-000001"), expected_parameters="q")


def test_another_versions_checkpoint_is_not_restored_and_its_weights_may_begin_a_run(tmp_path: Path):
    directory = _save(tmp_path / "step-000001", version="treadwheel-checkpoint-2")
    with pytest.raises(
        CheckpointError, match=r"written by another version of treadwheel, in format 'treadwheel-ch.*-2'"
    ) as error:
        verify(directory, expected_parameters="p")
    assert f"model.path={directory}/model" in str(error.value)
    verify(directory)
    verify_model(directory / "model")


def test_a_save_that_was_killed_leaves_no_checkpoint_and_is_cleared_away(tmp_path: Path):
    aside = begin(tmp_path / "step-000001")
    (aside / "half").write_text("x")
    assert checkpoints(tmp_path) == []
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
    checkpoint.discard(aside)
    verify(checkpoints(tmp_path)[-1])


def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.2], start=1):
        _save(tmp_path / f"step-{step:06d}", metric=metric)
    prune(tmp_path, keep_last=2, keep_best=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000004", "step-000005"]
    prune(tmp_path, keep_last=1, keep_best=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_shards_are_put_together_in_order_of_rank(tmp_path: Path):
    for rank, part in enumerate([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]):
        write_tensors(
            tmp_path / checkpoint.state_name(rank, 2), {"w": part, "step": torch.tensor(7.0), "own": part.clone()}
        )
    states = States(tmp_path, num_ranks=2)
    assert states.tensor("w").tolist() == [[1.0], [2.0], [3.0]] and float(states.tensor("step")) == 7.0
    assert states.of_rank("own", 2) is None


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path):
    begin(tmp_path / "step-000001")
    (tmp_path / ".step-000000.removing").mkdir()
    _save(tmp_path / "step-000002")
    prune(tmp_path, keep_last=1, keep_best=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_checkpoints_are_in_the_order_of_their_steps_and_other_folders_are_none(tmp_path: Path):
    for name in ("step-999999", "step-1000000", "step-000020.bad", ".step-000030.saving", "notes"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-999999", "step-1000000"]

"""A run directory proves what it claims, or each doubt is one line."""

import pyarrow as pa
import pytest

from cluster.contracts.errors import CheckpointError, StorageError
from cluster.contracts.schema import to_batch
from cluster.record.ledger import NAME, Ledger
from cluster.record.recorder import PRUNED, Recorder
from cluster.record.run_directory import METRICS, RunDirectory
from deploy.config.loading import resolved_yaml, validated
from deploy.reports.verify import verify
from learner.checkpoint import reading
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import row

CONFIG = validated({"model": {"path": "some/model"}, "prompts": "file", "buffer": {"groups_per_step": 1}})


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    """Three steps of one group with one trajectory."""
    directory = RunDirectory(str(tmp_path))
    for index in range(3):
        record(directory, to_batch([row(ticket_index=index, policy_versions=[index] * 3)]), groups=[index])
    return directory


def record(directory: RunDirectory, *batches: pa.RecordBatch, groups: list[int]) -> None:
    """Records the next step: these trajectories, and these groups in the ledger."""
    ledger = Ledger(directory)
    _, (name, digest) = Recorder(directory).record(ledger.version + 1, *batches)
    ledger.append(groups=groups, trajectories=name, trajectories_digest=digest)


def test_a_run_without_metrics_is_clean(directory):
    verdict = verify(directory, CONFIG)
    assert verdict.problems == ()
    assert (verdict.num_steps, verdict.num_groups, verdict.num_trajectories, verdict.num_tokens) == (3, 3, 3, 9)


def test_a_folder_in_which_nothing_is_recorded_is_not_called_clean(directory, tmp_path):
    """Seen before: so was a project's folder, for its run.yaml."""
    nothing = "0 steps, 0 groups, 0 trajectories, 0 tokens, 0 checkpoints: nothing is recorded yet"
    assert str(verify(RunDirectory(str(tmp_path / "other")), CONFIG)) == nothing
    assert str(verify(directory, CONFIG)).endswith("9 tokens, 0 checkpoints: clean")


@pytest.mark.parametrize(("logged", "problems"), [((0, 1, 2), 0), ((2, 3), 0), ((0, 2, 3), 0), ((0, 1, 3), 1)])
def test_metrics_that_are_there_have_no_gap(directory, logged, problems):
    for version in logged:
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0})
    found = verify(directory, CONFIG).problems
    assert len(found) == problems and all(line == "metrics.jsonl: steps [2] are missing" for line in found)


def test_of_many_missing_steps_the_first_are_named_and_the_others_counted(directory):
    for version in (1, 13):
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0})
    assert "metrics.jsonl: steps [2, 3, 4, 5, 6, 7, 8, 9] and 3 more are missing" in verify(directory, CONFIG).problems


def test_damaged_metrics_are_one_problem_among_the_others(directory):
    """Seen before: the verdict was that line alone, and said nothing of steps and checkpoints."""
    directory.write_file(METRICS, b'{"policy_version": 1, "time": 1.0}\n\0\0\0\n{"policy_version": 2, "time": 2.0}\n')
    directory.write_file("trajectories/step-000002.arrow", b"other")
    verdict = verify(directory, CONFIG)
    of_step, of_metrics = verdict.problems
    assert (
        of_step.startswith("step 2: ") and "metrics.jsonl line 2 is not JSON: " in of_metrics and verdict.num_steps == 3
    )


@pytest.mark.parametrize(("held", "groups"), [([[4]], [3]), ([[3, 4]], [3]), ([[3]], [3, 4]), ([[4], [3]], [3, 4])])
def test_trajectories_are_those_of_the_ledgers_groups_and_of_no_other(directory, held, groups):
    batches = [to_batch([row(ticket_index=each, policy_versions=[3] * 3) for each in group]) for group in held]
    record(directory, *batches, groups=groups)
    says = f"holds groups {[each for group in held for each in group]}, the ledger says {groups}"
    assert f"step 4: trajectories/step-000004.arrow {says}" in verify(directory, CONFIG).problems


def test_a_step_of_too_many_groups_is_a_problem(directory):
    """The second one's only trajectory has two segments."""
    alone = row(ticket_index=3, policy_versions=[3] * 3)
    parts = [alone | {"ticket_index": 4, "segment_index": place, "num_segments": 2} for place in (0, 1)]
    record(directory, to_batch([alone]), to_batch(parts), groups=[3, 4])
    verdict = verify(directory, CONFIG)
    assert verdict.problems == ("step 4 consumed 2 groups, not 1",)
    assert (verdict.num_steps, verdict.num_groups, verdict.num_trajectories, verdict.num_tokens) == (4, 5, 5, 18)


@pytest.mark.parametrize(
    ("versions", "bound", "is_recorded", "said"),
    [
        ([1, 3, 3], 2, False, None),
        ([1, 3, 3], 1, False, "1 to 3 break buffer.max_off_policy_steps=1"),
        ([1, 3, 3], 1, True, None),
        ([3, 3, 4], 1, False, "3 to 4 break buffer.max_off_policy_steps=1"),
        ([3, 3, 4], 1, True, "3 to 4 break buffer.max_off_policy_steps=1"),
        ([3, 0, 3], 1, False, None),
        ([3, 9, 3], 1, False, None),
        ([0, 9, 0], 1, False, None),
    ],
)
def test_no_sampled_token_is_older_than_the_bound_or_newer_than_the_learner(
    directory, versions, bound, is_recorded, said
):
    """Step 4 learns with version 3. Tokens of versions 0 and 9 are an environment's."""
    masked = [each not in (0, 9) for each in versions]
    record(directory, to_batch([row(ticket_index=3, policy_versions=versions, loss_mask=masked)]), groups=[3])
    buffer = CONFIG.buffer.model_copy(update={"max_off_policy_steps": bound})
    config = CONFIG.model_copy(update={"buffer": buffer, "recorded": "data" if is_recorded else None})
    expected = () if said is None else (f"step 4, group 00000007: tokens of versions {said}",)
    assert verify(directory, config).problems == expected


def test_a_ledger_that_contradicts_itself_is_one_problem_among_those_of_the_checkpoints(directory):
    directory.write_file("checkpoints/step-000001/model/config.json", b"{}")
    directory.replace_lines(NAME, directory.read_lines(NAME)[1:])
    of_ledger, of_checkpoint = verify(directory, CONFIG).problems
    assert of_ledger == f"{NAME} line 1: step 2 does not follow step 0" and "has no manifest.json" in of_checkpoint


def test_a_step_that_was_logged_and_that_the_ledger_does_not_have_is_a_problem(directory):
    """Seen before: a run without a checkpoint was clean when its ledger was not copied."""
    for version in (1, 2, 3, 4):
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0})
    assert verify(directory, CONFIG).problems == (f"{NAME}: it ends at step 3, and {METRICS} has step 4",)


@pytest.mark.parametrize("error", [CheckpointError("is torn"), StorageError("model.safetensors: it is missing")])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_checkpoint_that_a_living_run_removes_meanwhile_is_no_problem(directory, monkeypatch, error, is_removed):
    """Seen before: no verdict at all, if the file that was being read went."""

    def broken_off(place):
        if is_removed:
            directory.remove_folder("checkpoints")
        raise error

    directory.write_file("checkpoints/step-000001/manifest.json", b"{}")
    monkeypatch.setattr(reading, "verify", broken_off)
    verdict = verify(directory, CONFIG)
    assert verdict.problems == (() if is_removed else (str(error),)) and verdict.num_checkpoints == 1


def test_an_altered_trajectory_is_named_by_its_step(directory):
    directory.write_file("trajectories/step-000002.arrow", b"other")
    (problem,) = verify(directory, CONFIG).problems
    assert problem.startswith("step 2: trajectories/step-000002.arrow was altered after it was recorded")


@pytest.mark.parametrize("num_lost", [1, 20])
def test_a_torn_ledger_is_reported_and_left_as_it_is(directory, num_lost):
    directory.write_file(NAME, directory.read_file(NAME).to_pybytes()[:-num_lost])
    before = directory.read_text(NAME)
    assert verify(directory, CONFIG).problems == (f"{NAME}: its last line is torn; the next run removes it",)
    assert directory.read_text(NAME) == before


@pytest.mark.parametrize(("step", "problems"), [(3, 0), (4, 1)])
def test_a_checkpoint_of_a_step_that_the_ledger_does_not_have_is_a_problem(directory, step, problems):
    """Seen before: a run whose folder ledger was not copied was clean."""
    directory.write_file(f"checkpoints/step-{step:06d}/model/config.json", b"{}")
    found = [line for line in verify(directory, CONFIG).problems if line.startswith(NAME)]
    assert found == [f"{NAME}: it ends at step 3, and the newest checkpoint is of step 4"][:problems]


def test_a_line_that_a_living_run_is_writing_is_neither_read_nor_a_problem(directory):
    directory.write_file(NAME, directory.read_file(NAME).to_pybytes()[:-1])
    directory.claim(resolved_yaml(CONFIG))
    verdict = verify(RunDirectory(directory.url), CONFIG)
    directory.release()
    assert (verdict.num_steps, verdict.problems) == (2, ())


def test_trajectories_that_were_removed_are_said_and_are_no_problem(directory):
    for step in (1, 2):
        directory.write_file(f"checkpoints/step-{step:06d}", b"")
    group = row(ticket_index=2, policy_versions=[2] * 3)
    Recorder(directory, keep_steps=1).record(3, to_batch([group]))
    directory.remove("checkpoints/step-000001")
    directory.remove("checkpoints/step-000002")
    verdict = verify(directory, CONFIG)
    assert "; the trajectories of steps 1 to 2 were removed: clean" in str(verdict)
    assert (verdict.num_groups, verdict.num_trajectories) == (3, 1)


def test_a_step_that_is_pruned_while_it_is_read_is_no_problem(directory, monkeypatch):
    def read(self, name, digest):
        directory.write_json(PRUNED, {"steps": 1})
        directory.remove("trajectories/step-000001.arrow")
        return whole(self, name, digest)

    whole = Recorder.read
    monkeypatch.setattr(Recorder, "read", read)
    verdict = verify(directory, CONFIG)
    assert (verdict.problems, verdict.num_pruned_steps, verdict.num_trajectories) == ((), 1, 2)


def test_checkpoints_in_an_object_store_are_checked_and_torn_uploads_are_none():
    with s3("verified"):
        run = RunDirectory("s3://verified/run")
        run.write_file("checkpoints/step-000001/manifest.json", b"{}")
        run.write_file("checkpoints/step-000002/model/config.json", b"{}")
        verdict = verify(run, CONFIG)
    unreadable, beyond_the_ledger = verdict.problems
    assert "step-000001 has a manifest.json that cannot be read" in unreadable and verdict.num_checkpoints == 1
    assert beyond_the_ledger.endswith("the newest checkpoint is of step 1")

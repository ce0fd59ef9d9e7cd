"""A run directory proves what it claims, or each doubt is one line."""

import pytest

from cluster.contracts.schema import to_batch
from cluster.record.ledger import NAME, Ledger
from cluster.record.recorder import PRUNED, Recorder
from cluster.record.run_directory import METRICS, RunDirectory
from deploy.config.loading import resolved_yaml, validated
from deploy.reports.verify import verify
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import row

CONFIG = validated({"model": {"path": "some/model"}, "prompts": "file", "buffer": {"groups_per_step": 1}})


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    """Three steps of one group with one trajectory."""
    directory = RunDirectory(str(tmp_path))
    ledger, recorder = Ledger(directory), Recorder(directory)
    for index in range(3):
        group = row(ticket_index=index, group_id=f"{index:08d}", policy_versions=[index] * 3)
        _, (name, digest) = recorder.record(index + 1, to_batch([group]))
        ledger.append(groups=[index], trajectories=name, trajectories_digest=digest)
    return directory


def test_a_run_without_metrics_is_clean(directory):
    verdict = verify(directory, CONFIG)
    assert verdict.problems == ()
    assert (verdict.num_steps, verdict.num_groups, verdict.num_trajectories, verdict.num_tokens) == (3, 3, 3, 9)


@pytest.mark.parametrize(("logged", "problems"), [((0, 1, 2), 0), ((2, 3), 0), ((0, 2, 3), 0), ((0, 1, 3), 1)])
def test_metrics_that_are_there_have_no_gap(directory, logged, problems):
    for version in logged:
        directory.append_json(METRICS, {"policy_version": version})
    found = verify(directory, CONFIG).problems
    assert len(found) == problems and all(line == "metrics.jsonl: steps [2] are missing" for line in found)


def test_damaged_metrics_are_one_problem_among_the_others(directory):
    """Seen before: the verdict was that line alone, and said nothing of steps and checkpoints."""
    directory.write_file(METRICS, b'{"policy_version": 1}\n\0\0\0\n{"policy_version": 2}\n')
    directory.write_file("trajectories/step-000002.arrow", b"other")
    verdict = verify(directory, CONFIG)
    of_step, of_metrics = verdict.problems
    assert (
        of_step.startswith("step 2: ") and "metrics.jsonl line 2 is not JSON: " in of_metrics and verdict.num_steps == 3
    )


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
    group = row(ticket_index=2, group_id="00000002", policy_versions=[2] * 3)
    Recorder(directory, keep_steps=1).record(3, to_batch([group]))
    directory.remove("checkpoints/step-000001")
    directory.remove("checkpoints/step-000002")
    verdict = verify(directory, CONFIG)
    assert "; the trajectories of steps 1 to 2 were removed: clean" in str(verdict)
    assert (verdict.num_groups, verdict.num_trajectories) == (3, 1)


def test_a_step_that_is_pruned_while_it_is_read_is_no_problem(directory, monkeypatch):
    def read(self, name, digest):
        directory.write_json(PRUNED, {"steps": 2})
        for step in (1, 2):
            directory.remove(f"trajectories/step-{step:06d}.arrow")
        return whole(self, name, digest)

    whole = Recorder.read
    monkeypatch.setattr(Recorder, "read", read)
    verdict = verify(directory, CONFIG)
    assert (verdict.problems, verdict.num_pruned_steps, verdict.num_trajectories) == ((), 2, 1)


def test_checkpoints_in_an_object_store_are_checked_and_torn_uploads_are_none():
    with s3("verified"):
        run = RunDirectory("s3://verified/run")
        run.write_file("checkpoints/step-000001/manifest.json", b"{}")
        run.write_file("checkpoints/step-000002/model/config.json", b"{}")
        verdict = verify(run, CONFIG)
    unreadable, beyond_the_ledger = verdict.problems
    assert "step-000001 has a manifest.json that cannot be read" in unreadable and verdict.num_checkpoints == 1
    assert beyond_the_ledger.endswith("the newest checkpoint is of step 1")

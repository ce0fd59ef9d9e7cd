"""Samples are few, in the learner's order, and say why there are none."""

from cluster.record.run_directory import RunDirectory
from deploy.reports import samples as sampling
from deploy.reports.samples import Samples, samples
from tests.object_store import s3
from tests.unit.deploy.viewer.recorded import group, record


def test_the_first_groups_of_a_step_are_shown_with_their_first_completions_and_the_mean_of_all(tmp_path):
    again = group(4, 1.0, 1.0, prompt_id="p/0")
    others = [group(ticket, 1.0, completion_text="x" * 1503) for ticket in (1, 2, 3)]
    record(tmp_path, [group(0, 0.0, None, 1.0, 0.5), *others, again])
    found = samples(RunDirectory(str(tmp_path)))
    ((number, groups),) = found.steps
    assert (number, len(groups), found.are_same_prompts, found.missing) == (1, 3, False, "")
    told = [(each.reward, each.status) for each in groups[0].completions]
    assert (told, groups[0].mean_reward) == ([(0.0, ""), (None, "KeyError: 'answer'")], 0.5)
    assert groups[1].completions[0].text == "x" * 1500 + "… (3 characters more)"


def test_a_step_that_was_removed_since_it_was_listed_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "recorded_steps", lambda _: [5])
    none = samples(RunDirectory(str(tmp_path)))
    assert none == Samples(
        steps=(), are_same_prompts=False, missing="step 5 is not recorded: this run has no trajectories yet"
    )


def test_of_an_object_store_a_report_reads_no_large_file(monkeypatch):
    with s3("sampled"):
        record("s3://sampled/run", [group(0, 1.0)])
        assert samples(RunDirectory("s3://sampled/run")).missing == ""
        monkeypatch.setattr(sampling, "_MOST_BYTES", 1)
        assert "`treadwheel view` shows it" in samples(RunDirectory("s3://sampled/run")).missing

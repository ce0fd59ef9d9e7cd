import math

from cluster.record.run_directory import EVENTS, METRICS, PASSPORT, RunDirectory
from deploy.reports.provenance import RunProvenance, digest_of


def test_a_resumed_run_knows_the_evaluations_of_its_earlier_part(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.append_json(METRICS, {"policy_version": 0, "time": 1.0, "eval/reward": 0.25, "eval/accuracy": None})
    directory.append_json(METRICS, {"policy_version": 1, "time": 2.0, "reward/mean": 0.5})
    run = RunProvenance(directory)
    run.step(2, {"reward/mean": 0.5, "eval/reward": 0.5, "eval/accuracy": math.nan})
    run.step(4, {"eval/reward": 0.75, "eval/reward_stderr": math.inf})
    assert run.at(4).evaluations == {0: {"eval/reward": 0.25}, 4: {"eval/reward": 0.75}}
    assert run.at(3).evaluations == {0: {"eval/reward": 0.25}, 2: {"eval/reward": 0.5}}
    assert run.at(1).evaluations == {0: {"eval/reward": 0.25}}


def test_evaluations_of_another_identity_are_left_out(tmp_path):
    """Seen in review: a model card showed scores on easier prompts as if they were of the present ones."""
    directory = RunDirectory(str(tmp_path))
    for version, identity in enumerate((None, "easy", "hard")):
        event = {"time": 1.0, "kind": "evaluating", "policy_version": version}
        directory.append_json(EVENTS, event | ({"identity": identity} if identity else {}))
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0, "eval/reward": 0.5})
    assert [*RunProvenance(directory, identity="hard").at(2).evaluations] == [0, 2]
    assert not RunProvenance(directory, identity="hard").is_evaluated(1)
    assert RunProvenance(directory).is_evaluated(1), "the run has stopped evaluating"


def test_a_passport_that_does_not_say_what_the_run_computes_has_no_digest(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.write_json(PASSPORT, {"versions": {"torch": "2"}})
    assert (RunProvenance(directory).at(0).passport_digest, RunProvenance(directory).at(0).versions) == (
        None,
        {"torch": "2"},
    )


def test_the_passport_is_told_once_it_is_written(tmp_path):
    directory = RunDirectory(str(tmp_path))
    run = RunProvenance(directory)
    assert (run.at(0).passport_digest, run.at(0).versions) == (None, {})
    passport = {"mathematics": {"seed": 0}, "versions": {"torch": "2"}}
    directory.write_json(PASSPORT, passport)
    assert (run.at(0).passport_digest, run.at(0).versions) == (digest_of(passport), {"torch": "2"})
    assert digest_of({**passport, "versions": {}}) == digest_of(passport) != digest_of({"mathematics": {"seed": 1}})

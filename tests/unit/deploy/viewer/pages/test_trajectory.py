"""A trajectory's tokens: the numbers of its files, and a sentence for each that was not recorded."""

import json
import math

import pyarrow as pa
import pytest

from cluster.contracts.learned import LEARNED_SCHEMA, written_learned
from cluster.record.run_directory import RunDirectory
from deploy.viewer.pages.trajectory import TokensOfStep
from deploy.viewer.runs import Run
from deploy.viewer.steps import open_step
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import CONFIG, append, step, write_run, write_trajectories

ROW = {
    "ticket_index": 7,
    "sample_index": 0,
    "policy_logprobs": [-0.75, None, -math.inf],
    "proximal_logprobs": None,
    "advantages": [0.1, None, math.nan],
    "weights": [1.0, None, 2.0],
    "clipped": [False, None, True],
    "entropies": None,
}


@pytest.fixture
def run(tmp_path) -> Run:
    folder = write_run(tmp_path / "run")
    _configure(folder, record={"learned_groups": 1})
    write_trajectories(folder, 4, [row(rollout_logprobs=[-0.1, 0.0, -1.5], loss_mask=[True, False, True])])
    return Run("run", RunDirectory(str(folder)))


def _configure(folder, **sections) -> None:
    (folder / "run.yaml").write_text(json.dumps({**CONFIG, **sections}))


def _learned(run: Run, *rows: dict) -> None:
    content = written_learned([pa.RecordBatch.from_pylist(rows, schema=LEARNED_SCHEMA)], policy_version=3)
    run.directory.write_file("learned/step-000004.arrow", content)


def _tokens(run: Run) -> dict:
    return TokensOfStep(run, open_step(run, 4)).of(7, 0)


def test_numbers_are_those_of_the_files_and_words_where_they_are_not_finite(run):
    _learned(run, ROW)
    tokens = _tokens(run)
    assert tokens["ids"] == [3, 4, 5]
    assert tokens["rollout"] == [0.0 - 0.100000001, 0.0, -1.5], "the float32 nearest to 0.1, in nine digits"
    assert tokens["learned"]["policy_logprobs"] == [-0.75, None, "-Infinity"]
    assert tokens["learned"]["advantages"] == [0.100000001, None, "NaN"]
    assert tokens["learned"]["clipped"] == [False, None, True]
    assert tokens["learned"]["entropies"] is None and tokens["proximal"] == "rollout"
    json.dumps(tokens, allow_nan=False)


def test_what_was_not_recorded_is_said(run):
    assert _tokens(run)["missing"] == {
        "reference": "not recorded: this run has no reference model",
        "rewards": "not recorded: the reward is for the whole completion",
        "learned": f"not recorded; `treadwheel replay {run.place} --learned 4` writes it",
    }


def test_why_there_is_no_record_of_learning_is_told_apart(run, tmp_path):
    _learned(run, {**ROW, "ticket_index": 6})
    assert "for this group: record.learned_groups=1; `treadwheel replay" in _tokens(run)["missing"]["learned"]
    _learned(run, {**ROW, "sample_index": 1})
    assert "did not reach this trajectory" in _tokens(run)["missing"]["learned"]
    _learned(run, {**ROW, **{name: [*value, value[0]] for name, value in ROW.items() if isinstance(value, list)}})
    assert "has another completion" in _tokens(run)["missing"]["learned"]
    run.directory.write_file("learned/step-000004.arrow", b"torn")
    assert "learned/step-000004.arrow: a damaged record" in _tokens(run)["missing"]["learned"]
    _configure(tmp_path / "run", record={"learned_groups": 0})
    run.directory.remove("learned/step-000004.arrow")
    assert _tokens(run)["missing"]["learned"].startswith("not recorded: record.learned_groups=0;")


def test_a_step_that_is_being_learned_says_so(run, tmp_path):
    append(tmp_path / "run/metrics.jsonl", [step(3)])
    run.directory.claim((tmp_path / "run/run.yaml").read_text())
    try:
        assert _tokens(run)["missing"]["learned"] == "not recorded yet: the learner is working on this step"
        append(tmp_path / "run/metrics.jsonl", [step(4)])
        assert _tokens(run)["missing"]["learned"].startswith("not recorded; `treadwheel replay")
    finally:
        run.directory.release()


def test_without_the_tokenizer_tokens_are_numbers_and_the_page_says_where_it_was_looked_for(run):
    tokens = _tokens(run)
    assert tokens["texts"] == ["⟨3⟩", "⟨4⟩", "⟨5⟩"]
    assert "The tokenizer of a-model is not on this machine" in tokens["tokenizer"]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_tokenizer_that_cannot_be_read_is_named_and_tokens_are_numbers(run, content):
    run.directory.write_file("checkpoints/step-000004/model/tokenizer.json", content)
    tokens = _tokens(run)
    assert tokens["texts"] == ["⟨3⟩", "⟨4⟩", "⟨5⟩"]
    assert "step-000004/model/tokenizer.json is no tokenizer: " in tokens["tokenizer"]

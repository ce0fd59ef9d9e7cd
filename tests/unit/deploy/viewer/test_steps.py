"""One recorded step, read back: what became of each trajectory, its text, its tokens; and sentences for what is not there."""

import json
import struct
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cluster.contracts.errors import DataError
from cluster.contracts.schema import SCHEMA, to_batch
from cluster.record.run_directory import RunDirectory
from deploy.viewer.pages.step import step as step_page
from deploy.viewer.runs import Run
from deploy.viewer.steps import neighbours, open_step, recorded_steps
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import before, row
from tests.unit.deploy.viewer.recorded import group, record
from tests.unit.deploy.viewer.run_files import write_run, write_trajectories

END = datetime(2026, 1, 1, 0, 0, 4, tzinfo=UTC)


@pytest.fixture
def run(tmp_path) -> Run:
    """Step 4 of two groups. In the second, a tool wrote the middle token, under an older policy."""
    folder = write_run(tmp_path / "run")
    first = [row(), row(sample_index=2, reward=None, reward_status="error", reward_message="KeyError: 'x'")]
    second = row(
        ticket_index=9,
        group_id="00000009",
        loss_mask=[True, False, True],
        policy_versions=[2, 0, 3],
        reward_components=[("style", 0.5), ("length", None)],
        completion_text="two",
        info=json.dumps({"answer": "2"}),
        finished_at=END,
    )
    write_trajectories(folder, 4, first, [second])
    return Run("run", RunDirectory(str(folder)))


def test_a_group_says_what_became_of_each_of_its_trajectories(run):
    step = open_step(run, 4)
    assert step.tickets == [7, 9]
    first, second = step.groups()
    assert [each.sample_index for each in first.trajectories] == [0, 2]
    assert [each.reward for each in first.trajectories] == [1.0, None]
    assert first.trajectories[1].reward_message == "KeyError: 'x'"
    only = second.trajectories[0]
    assert (second.seconds, only.num_tokens, only.num_trained) == (4.0, 3, 2)
    assert only.components == {"style": 0.5, "length": None}


def test_secrets_in_a_judges_error_are_hidden(tmp_path):
    folder = write_run(tmp_path / "run")
    error = "401 for https://judge.example/v1?api_key=abc with Bearer abc"
    write_trajectories(folder, 1, [row(reward=None, reward_status="error", reward_message=error)])
    (shown,) = open_step(Run("run", RunDirectory(str(folder))), 1).group(7).trajectories
    assert shown.reward_message == "401 for https://judge.example/v1?api_key=<hidden> with Bearer <hidden>"


def test_staleness_counts_from_the_policy_that_learns_and_leaves_out_what_a_tool_wrote(run):
    """Step 4 learns with policy 3; the oldest token that is trained on is of policy 2, and a tool's is of policy 0."""
    only = open_step(run, 4).group(9).trajectories[0]
    assert (only.oldest_version, only.newest_version, only.staleness) == (2, 3, 1)


def test_texts_and_tokens_are_those_of_the_file(run):
    step = open_step(run, 4)
    assert step.prompt(9) == ("1+1=", {"answer": "2"})
    assert step.completions(9) == {0: "two"}
    tokens = step.tokens(9, 0)
    assert (tokens["completion_token_ids"], tokens["loss_mask"]) == ([3, 4, 5], [True, False, True])
    assert tokens["rollout_logprobs"] == [-0.5, -1.0, -1.5]
    assert tokens["reference_logprobs"] is None


@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1, 2)])
def test_episodes_that_failed_before_their_first_token_are_shown_among_the_others(tmp_path, places):
    folder = write_run(tmp_path / "run")
    empty = {name: [] for name in ("completion_token_ids", "loss_mask", "rollout_logprobs", "policy_versions")}
    died = {**empty, "completion_text": "", "reward": None, "reward_status": "error"}
    rows = [row(sample_index=sample, **(died if sample in places else {})) for sample in range(3)]
    write_trajectories(folder, 4, rows)
    run = Run("run", RunDirectory(str(folder)))
    told = open_step(run, 4).group(7).trajectories
    of_each = [
        (each.num_tokens, each.num_trained, each.oldest_version, each.newest_version, each.staleness) for each in told
    ]
    assert of_each == [(0, 0, None, None, None) if sample in places else (3, 3, 2, 3, 1) for sample in range(3)]
    assert open_step(run, 4).tokens(7, places[0])["completion_token_ids"] == []
    page = step_page(run, Request({"type": "http", "query_string": b"", "path_params": {"step": 4}, "headers": []}))
    assert page["rows"][0]["staleness"] == (None if len(places) == 3 else 1)


def test_an_episode_of_several_segments_is_shown_as_one_completion(tmp_path):
    folder = write_run(tmp_path / "run")
    parts = [{"completion_text": "one "}, {"completion_text": "two", "segment_index": 1, "prompt_token_ids": [9]}]
    rows = [row(num_segments=2, **part) for part in parts]
    write_trajectories(folder, 4, [*rows, row(sample_index=1)])
    step = open_step(Run("run", RunDirectory(str(folder))), 4)
    assert [(each.sample_index, each.num_tokens) for each in step.group(7).trajectories] == [(0, 6), (1, 3)]
    assert step.completions(7) == {0: "one two", 1: "2"}
    tokens = step.tokens(7, 0)
    assert (tokens["prompt_token_ids"], tokens["completion_token_ids"]) == ([1, 2], [3, 4, 5, 3, 4, 5])


def test_a_file_of_the_version_before_is_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    file = folder / "trajectories/step-000004.arrow"
    file.parent.mkdir()
    old = before(row(), row(sample_index=1))
    with pa.ipc.new_file(str(file), old.schema) as writer:
        writer.write_batch(old)
    step = open_step(Run("run", RunDirectory(str(folder))), 4)
    assert [(each.sample_index, each.num_tokens) for each in step.group(7).trajectories] == [(0, 3), (1, 3)]


def test_a_number_of_a_source_that_no_browser_reads_is_told_by_its_name(tmp_path):
    folder = write_run(tmp_path / "run")
    write_trajectories(folder, 1, [row(info='{"a": NaN, "b": [-Infinity, 1e999], "c": 0.5}')])
    _, columns = open_step(Run("run", RunDirectory(str(folder))), 1).prompt(7)
    assert columns == {"a": "NaN", "b": ["-Infinity", "1e999"], "c": 0.5}


def test_digits_of_a_number_that_browsers_would_round_are_kept(tmp_path):
    folder = write_run(tmp_path / "run")
    most, long = 2**53 - 1, "9" * 5000
    write_trajectories(folder, 1, [row(info=f'{{"a": {most}, "b": {most + 2}, "c": [-{most + 2}], "d": {long}}}')])
    _, columns = open_step(Run("run", RunDirectory(str(folder))), 1).prompt(7)
    assert columns == {"a": most, "b": str(most + 2), "c": [str(-most - 2)], "d": long}


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: open_step(run, 5), "step 5 is not recorded: there are trajectories of steps 4 to 4"),
        (lambda run: open_step(run, 4).group(8), "step 4 has no group 8"),
        (lambda run: open_step(run, 4).tokens(9, 3_000_000_000), "group 9 of step 4 has no trajectory 3000000000"),
        (lambda run: open_step(run, 4).tokens(7, 1), "group 7 of step 4 has no trajectory 1"),
    ],
)
def test_what_is_not_there_is_said(run, ask, said):
    with pytest.raises(HTTPException) as error:
        ask(run)
    assert (error.value.status_code, error.value.detail) == (404, said)


def test_steps_that_were_removed_are_told_from_steps_that_never_were(run):
    run.directory.write_json("trajectories/pruned.json", {"steps": 3})
    with pytest.raises(HTTPException, match="steps up to 3 were removed"):
        open_step(run, 2)
    assert recorded_steps(run) == [4]


def test_the_ledger_knows_a_step_whose_trajectories_were_removed(tmp_path):
    record(tmp_path, [group(0, 1.0)], [group(1, 1.0)])
    run = Run("run", RunDirectory(str(tmp_path)))
    run.directory.remove("trajectories/step-000001.arrow")
    run.directory.write_json("trajectories/pruned.json", {"steps": 1})
    with pytest.raises(HTTPException, match="steps up to 1 were removed"):
        open_step(run, 1)


def test_of_an_object_store_a_file_that_the_ledger_does_not_name_is_not_shown():
    with s3("two-drivers"):
        record("s3://two-drivers/run", [group(0, 1.0)])
        run = Run("run", RunDirectory("s3://two-drivers/run"))
        (name,) = run.directory.names("trajectories")
        content = run.directory.read_file(f"trajectories/{name}")
        run.directory.remove(f"trajectories/{name}")
        run.directory.write_file("trajectories/step-000001-0a1b.arrow", content)
        with pytest.raises(HTTPException, match="404"):
            open_step(run, 1)


def test_a_damaged_file_is_named(run):
    run.directory.write_file("trajectories/step-000004.arrow", b"ARROW1 and then nothing")
    with pytest.raises(DataError, match=r"step-000004\.arrow is damaged"):
        open_step(run, 4)


@pytest.mark.parametrize(("part", "other"), [(b"run_id", b"run_i\xff"), (b'{"answer": "2"}', b'{"answer": 2..}')])
def test_a_damaged_file_is_named_whatever_is_damaged(run, part, other):
    """Seen before: half a character in a field's name, or what is no JSON in a prompt's columns, was an error of Python's alone."""
    content = run.directory.read_file("trajectories/step-000004.arrow").to_pybytes()
    run.directory.write_file("trajectories/step-000004.arrow", content.replace(part, other))
    with pytest.raises(DataError, match=r"step-000004\.arrow is damaged"):
        open_step(run, 4).prompt(9)


def test_a_file_whose_lists_end_beyond_it_is_damaged(run):
    content = run.directory.read_file("trajectories/step-000004.arrow").to_pybytes()
    ends, beyond = (struct.pack("<3i", 0, 3, end) for end in (6, 2**30))  # of the first group's completions
    run.directory.write_file("trajectories/step-000004.arrow", content.replace(ends, beyond))
    with pytest.raises(DataError, match=r"step-000004\.arrow is damaged"):
        open_step(run, 4).group(7)


@pytest.mark.parametrize("changed", [{"policy_versions": [[2, 3]]}, {"loss_mask": [[]], "policy_versions": [[]]}])
def test_a_completion_whose_columns_do_not_fit_is_damaged(tmp_path, changed):
    folder = write_run(tmp_path / "run")
    file = write_trajectories(folder, 4)
    batch = to_batch([row()])
    for name, values in changed.items():
        place = SCHEMA.get_field_index(name)
        batch = batch.set_column(place, SCHEMA.field(place), pa.array(values, type=SCHEMA.field(place).type))
    with pa.ipc.new_file(str(file), SCHEMA) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match="empty, or its columns have different lengths"):
        open_step(Run("run", RunDirectory(str(folder))), 4).group(7)


def test_neighbours_end_at_the_ends():
    assert neighbours([3, 5, 9], 5) == (3, 9)
    assert neighbours([3], 3) == (None, None)

"""What others can learn from what a run recorded."""

import json
import os

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from cluster.contracts.errors import StorageError
from cluster.contracts.schema import to_batch
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder
from cluster.record.run_directory import RunDirectory
from deploy.cli import app
from deploy.export import FORMATS, Chosen, export
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.episode_rows import MESSAGES, episode_rows

ASKED = [{"role": "user", "content": "1+1="}]


def recorded(folder, *groups) -> None:
    """A step a group. A row is what differs from the usual one."""
    directory = RunDirectory(str(folder))
    ledger, recorder = Ledger(directory), Recorder(directory)
    for index, group in enumerate(groups):
        rows = [
            row(ticket_index=index, group_id=f"{index:08d}", policy_versions=[index] * 3, sample_index=sample, **each)
            for sample, each in enumerate(group)
        ]
        _, (name, digest) = recorder.record(index + 1, to_batch(rows))
        ledger.append(groups=[index], trajectories=name, trajectories_digest=digest)


def exported(folder, *options: str) -> list[dict]:
    out = folder / "out.jsonl"
    result = CliRunner().invoke(app, ["export", str(folder), str(out), *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


GROUP = [
    {"reward": 0.5, "completion_text": "3"},
    {"reward": 1.0, "completion_text": "2"},
    {"reward": 1.0, "completion_text": "two"},
    {"reward": 9.0, "completion_text": "2 2 2", "finish_reason": "length"},
    {"reward": None, "completion_text": "?", "reward_status": "error", "reward_message": "it raised"},
]


def test_the_best_of_each_group_that_ended_and_was_judged_are_examples(tmp_path):
    recorded(tmp_path, GROUP, [{"reward": 0.0, "completion_text": "4"}])
    assert exported(tmp_path, "--format", "sft") == [
        {"prompt": "1+1=", "completion": "2", "reward": 1.0},
        {"prompt": "1+1=", "completion": "4", "reward": 0.0},
    ]


def test_more_of_a_group_and_only_good_ones(tmp_path):
    recorded(tmp_path, GROUP, [{"reward": 0.0, "completion_text": "4"}])
    lines = exported(tmp_path, "--format", "sft", "--best", "3", "--min-reward", "0.6")
    assert [line["completion"] for line in lines] == ["2", "two"]


def test_where_the_prompt_was_messages_examples_are_conversations(tmp_path):
    recorded(tmp_path, [{"prompt_text": "user: 1+1=", "info": json.dumps({"messages": ASKED, "answer": "2"})}])
    (line,) = exported(tmp_path, "--format", "sft")
    assert line["messages"] == [*ASKED, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("format", "shown"),
    [("sft", {"prompt": "1+1=", "completion": "2"}), ("dpo", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})],
)
def test_what_a_model_without_a_chat_template_saw_is_a_text(tmp_path, format, shown):
    """Seen before: a text row has messages too, for models with a template, and examples had those."""
    info = json.dumps({"messages": ASKED})
    recorded(tmp_path, [{**each, "info": info} for each in GROUP[:2]])
    (line,) = exported(tmp_path, "--format", format)
    assert {name: value for name, value in line.items() if not name.startswith("reward")} == shown


def test_best_and_worst_of_a_group_are_a_pair_unless_they_are_equal(tmp_path):
    recorded(tmp_path, GROUP, [{"reward": 1.0}, {"reward": 1.0}])
    assert exported(tmp_path, "--format", "dpo") == [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "reward_chosen": 1.0, "reward_rejected": 0.5}
    ]


def test_an_assistants_message_of_the_prompt_is_no_answer_where_replies_are_recorded(tmp_path):
    example = [*ASKED, {"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2="}]

    def episode(answer: str, reward: float) -> dict:
        messages = [*example, {"role": "assistant", "content": answer}]
        told = {"num_calls": 0, "num_malformed_calls": 0, "log": {}, "replies": [[3]]}
        return {"reward": reward, "messages": json.dumps(messages), "episode": json.dumps(told)}

    recorded(tmp_path, [episode("four", 1.0), episode("five", 0.0)])
    (pair,) = exported(tmp_path, "--format", "dpo")
    assert (pair["prompt"], pair["chosen"]) == (example, [{"role": "assistant", "content": "four"}])


def with_tools(answer: str, reward: float, tools: list) -> dict:
    messages = [*ASKED, {"role": "assistant", "content": answer}]
    told = {"num_calls": 0, "num_malformed_calls": 0, "log": {}, "replies": [[1]], "tools": tools}
    return {"reward": reward, "messages": json.dumps(messages), "episode": json.dumps(told)}


ADD, DIVIDE = ({"type": "function", "function": {"name": name, "description": name}} for name in ("add", "divide"))


@pytest.mark.parametrize("format", ["sft", "dpo"])
def test_lines_have_the_tools_that_the_model_saw_in_the_order_of_its_prompt(tmp_path, format):
    """Seen before: calls of tools that the example did not show."""
    recorded(tmp_path, [with_tools("2", 1.0, [[DIVIDE, ADD]]), with_tools("3", 0.0, [[DIVIDE, ADD]])])
    (line,) = exported(tmp_path, "--format", format)
    assert json.dumps(line["tools"]) == json.dumps([DIVIDE, ADD])


@pytest.mark.parametrize("tools", [[[]], []])
def test_lines_of_an_episode_without_tools_do_not_name_any(tmp_path, tools):
    recorded(tmp_path, [with_tools("2", 1.0, tools)])
    assert "tools" not in exported(tmp_path, "--format", "sft")[0]


def test_each_segment_has_its_own_tools(tmp_path):
    two_segments(tmp_path, episode=json.dumps({"tools": [[ADD], []]}))
    assert [line.get("tools") for line in exported(tmp_path, "--format", "sft")] == [[ADD], None]


def test_both_halves_of_a_pair_saw_the_same_tools(tmp_path):
    recorded(tmp_path, [with_tools("2", 1.0, [[ADD]]), with_tools("3", 0.5, [[ADD]]), with_tools("4", 0.0, [[DIVIDE]])])
    (pair,) = exported(tmp_path, "--format", "dpo")
    assert (pair["tools"], pair["rejected"][0]["content"]) == ([ADD], "3")


def test_both_halves_of_a_pair_answer_one_prompt(tmp_path):
    """Seen before: agents that write the time into their prompts gave pairs whose rejected answer was to another one."""

    def episode(asked: str, answer: str, reward: float) -> dict:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        told = {"num_calls": 0, "num_malformed_calls": 0, "log": {}, "replies": [[1]]}
        return {"reward": reward, "messages": json.dumps(messages), "episode": json.dumps(told)}

    at_noon, at_one = (
        (episode("12:00", said, reward) for said, reward in (("noon", 1.0), ("lunch", 0.5))),
        episode("13:00", "one", 0.0),
    )
    recorded(tmp_path, [*at_noon, at_one])
    (pair,) = exported(tmp_path, "--format", "dpo")
    assert pair["prompt"] == [{"role": "user", "content": "12:00"}]
    assert (pair["rejected"][0]["content"], pair["reward_rejected"]) == ("lunch", 0.5)


def two_segments(folder, *others: dict, **changed) -> None:
    """An episode of two segments, and other rows of its group."""
    directory = RunDirectory(str(folder))
    judged = {"reward_status": "ok", "failed_stage": None, "reward": 1.25}
    rows = episode_rows(lambda text: [len(word) for word in text.split()], **judged, **changed)
    _, (name, digest) = Recorder(directory).record(1, to_batch([*rows, *others]))
    Ledger(directory).append(groups=[7], trajectories=name, trajectories_digest=digest)


def test_each_segment_of_an_episode_is_a_conversation_and_no_half_of_a_pair(tmp_path):
    # To the same question.
    said = json.dumps([MESSAGES[0][0], {"role": "assistant", "content": "86"}])
    episode = json.dumps({"num_calls": 0, "num_malformed_calls": 0, "log": {}, "replies": [[1]]})
    two_segments(tmp_path, row(sample_index=1, reward=0.0, messages=said, episode=episode))
    assert [line["messages"] for line in exported(tmp_path, "--format", "sft")] == [list(each) for each in MESSAGES]
    (tmp_path / "out.jsonl").unlink()
    refused = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out.jsonl"), "--format", "dpo"])
    assert refused.exit_code == 2 and "nothing is chosen" in refused.output and not (tmp_path / "out.jsonl").exists()


def test_parquet_is_a_file_a_step_that_reads_as_one_table(tmp_path):
    recorded(tmp_path, GROUP, GROUP, GROUP)
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "tables"), "--steps", "2-3"])
    assert result.exit_code == 0 and "10 rows" in result.output
    table = pyarrow.parquet.read_table(tmp_path / "tables")
    assert table["step"].to_pylist() == [2] * 5 + [3] * 5
    assert table["completion_token_ids"].to_pylist()[0] == [3, 4, 5]


def test_no_column_of_parquet_is_a_map_which_datasets_refuses(tmp_path):
    recorded(tmp_path, [{"reward_components": [("right", 1.0), ("short", None)]}, {"reward_components": []}])
    assert CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "tables")]).exit_code == 0
    table = pyarrow.parquet.read_table(tmp_path / "tables")
    assert not [field.name for field in table.schema if pyarrow.types.is_map(field.type)]
    told = [{"key": "right", "value": 1.0}, {"key": "short", "value": None}]
    assert table["reward_components"].to_pylist() == [told, []]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError])
def test_an_export_that_is_broken_off_leaves_nothing(tmp_path, monkeypatch, format, error):
    recorded(tmp_path, GROUP, GROUP)
    read = Recorder.read

    def broken_off(self, name, digest):
        if name.endswith("step-000002.arrow"):
            raise error("the second step cannot be read")
        return read(self, name, digest)

    monkeypatch.setattr(Recorder, "read", broken_off)
    (tmp_path / "exports").mkdir()
    with pytest.raises(error):
        export(RunDirectory(str(tmp_path)), str(tmp_path / "exports" / "out"), format=format, chosen=Chosen())
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "csv"], "choose parquet, sft, dpo"),
        (["--min-reward", "1"], "--min-reward=1 has no effect with --format=parquet"),
        (["--format", "dpo", "--best", "4"], "--best=4 has no effect with --format=dpo"),
        (["--steps", "7"], "has trajectories of steps 1 to 1"),
        (["--steps", "some"], "is neither a step"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, options, says):
    recorded(tmp_path, GROUP)
    refused = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out"), *options])
    assert refused.exit_code == 2 and says in refused.output


def test_a_folder_without_a_run_is_named(tmp_path):
    """Seen before: "has trajectories of no step"."""
    refused = CliRunner().invoke(app, ["export", str(tmp_path / "typo"), str(tmp_path / "out")])
    assert refused.exit_code == 2 and "typo' holds no run (no run.yaml); name the run_dir of a run" in refused.output


def test_no_local_folder_is_made_of_an_object_stores_address(tmp_path, monkeypatch):
    """Seen before: the rows lay in a folder named `s3:` below the current one."""
    recorded(tmp_path / "run", GROUP)
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["export", "run", "s3://bucket/tables"])
    assert refused.exit_code == 2 and "'s3://bucket/tables' is in an object store, and an export" in refused.output
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_what_is_there_is_not_overwritten(tmp_path):
    recorded(tmp_path, GROUP)
    (tmp_path / "out").write_text("mine")
    refused = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out"), "--format", "sft"])
    assert refused.exit_code == 2 and (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_is_whole_after_a_power_cut_too(format, tmp_path, monkeypatch):
    """Seen in review: its name could outlast what was in it."""
    recorded(tmp_path / "run", GROUP)
    order, rename = [], os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "rename", lambda path, to: order.append("renamed") or rename(path, to))
    export(RunDirectory(str(tmp_path / "run")), str(tmp_path / "out"), format=format, chosen=Chosen())
    files = ["step-000001.parquet", "out"] if format == "parquet" else ["out"]
    assert [os.path.basename(each) for each in order] == [*files, "renamed", tmp_path.name]

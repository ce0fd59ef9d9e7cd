"""Groups that exist already: which are read, how they are named, and what an import makes of rows."""

import json

import pyarrow as pa
import pytest

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.schema import SCHEMA
from deploy.recorded import RecordedGroups, import_rows
from tests.models import make_tiny_model
from tests.unit.learner.trajectories import make_group

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model"), chat_template=CHAT)))


def write(path, *batches: pa.RecordBatch) -> str:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return str(path)


def rows(path, *lines: dict) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def opened(place: str, dropped_by=lambda summary: None) -> RecordedGroups:
    return RecordedGroups.open(place, seed=0, dropped_by=dropped_by)


def test_a_group_stays_whole_however_its_file_is_divided_and_two_files_groups_stay_apart(tmp_path):
    group = make_group(3)
    write(tmp_path / "a.arrow", group.slice(0, 1), make_group(4), group.slice(1))
    write(tmp_path / "b.arrow", make_group(3))
    data = opened(str(tmp_path))
    assert len(data) == 3
    assert [data.group(index).num_rows for index in range(3)] == [3, 3, 3]


def test_every_epoch_has_every_group_once_in_an_order_of_its_own_and_under_a_name_of_its_own(tmp_path):
    data = opened(write(tmp_path / "a.arrow", *(make_group(i) for i in range(8))))
    epochs = [[data.group(index)["prompt_id"][0].as_py() for index in range(8 * e, 8 * e + 8)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    again = data.group(9)
    assert set(again["group_id"].to_pylist()) == {"00000009"} and set(again["ticket_index"].to_pylist()) == {9}


def test_tokens_count_as_sampled_by_the_oldest_version_and_another_runs_reference_is_left_out(tmp_path):
    group = make_group(0, version=7)
    group = group.set_column(
        SCHEMA.get_field_index("reference_logprobs"),
        SCHEMA.field("reference_logprobs"),
        group["rollout_logprobs"].cast(SCHEMA.field("reference_logprobs").type),
    )
    found = opened(write(tmp_path / "a.arrow", group)).group(0)
    assert {version for row in found["policy_versions"].to_pylist() for version in row} == {0}
    assert found["reference_logprobs"].null_count == found.num_rows
    assert found["rollout_logprobs"] == group["rollout_logprobs"]


def test_groups_that_teach_nothing_are_left_out_and_a_place_without_any_is_refused(tmp_path):
    known, failed, filtered = make_group(0), make_group(1, rewards=(None, None)), make_group(2, rewards=(1.0, 1.0))
    of_no_variance = lambda summary: "zero_variance" if len(set(summary.rewards)) == 1 else None
    assert len(opened(write(tmp_path / "a.arrow", known, failed, filtered), of_no_variance)) == 1
    with pytest.raises(ConfigError, match="has 2 groups, and none to learn from"):
        opened(write(tmp_path / "b.arrow", failed, filtered), of_no_variance)
    with pytest.raises(ConfigError, match="has 0 groups, and none to learn from"):
        opened(write(tmp_path / "empty.arrow"))
    with pytest.raises(ConfigError, match=r"nothing\.arrow"):
        opened(str(tmp_path / "nothing.arrow"))


def test_what_is_no_trajectory_is_named_with_its_file(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"none")
    with pytest.raises(DataError, match=r"a\.arrow: "):
        opened(str(tmp_path / "a.arrow"))


def test_an_import_writes_tokens_as_the_model_would_have_sampled_them(tmp_path, model):
    lines = (
        {"messages": [{"role": "user", "content": "2+2"}], "completion": "4", "reward": 1, "kind": "sum"},
        {"prompt": "3+3", "completion": "7", "reward": 0.0},
        {"messages": [{"role": "user", "content": "2+2"}], "completion": "5", "reward": 0.5},
    )
    out = str(tmp_path / "out.arrow")
    assert import_rows(rows(tmp_path / "in.jsonl", *lines), out, model=model) == (2, 3)
    with pa.ipc.open_file(out) as reader:
        first, second = (reader.get_batch(i) for i in range(reader.num_record_batches))
    assert first["prompt_text"].to_pylist() == ["user: 2+2<eos>\nassistant: "] * 2
    # "4", then <eos>, which the template writes behind an answer: ids 8 and 1 of the tokenizer.
    assert first["completion_token_ids"].to_pylist() == [[8, 1], [9, 1]]
    assert first["reward"].to_pylist() == [1.0, 0.5] and second["reward"].to_pylist() == [0.0]
    assert first["rollout_logprobs"].null_count == 2
    assert json.loads(first["info"][0].as_py()) == {"kind": "sum"}
    assert len(opened(out)) == 2


def test_rows_of_one_group_column_are_a_group_whatever_their_prompts(tmp_path, model):
    lines = ({"prompt": text, "completion": "1", "reward": 1.0, "group": "a"} for text in "xyz")
    assert import_rows(rows(tmp_path / "in.jsonl", *lines), str(tmp_path / "out.arrow"), model=model) == (1, 3)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "reward": 1.0}, "completion is 'None'; it must be a text"),
        ({"prompt": "a", "completion": "b"}, "reward is 'None'; it must be a finite number"),
        ({"prompt": "a", "completion": "b", "reward": True}, "reward is 'True'"),
        ({"prompt": "a", "completion": "b", "reward": float("nan")}, "reward is 'nan'"),
        ({"prompt": "a", "completion": "", "reward": 1.0}, "has an empty completion"),
        ({"prompt": "a", "completion": "b" * 300, "reward": 1.0}, "shorten or drop it"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(tmp_path, model, row, why):
    good = {"prompt": "a", "completion": "b", "reward": 1.0}
    with pytest.raises(DataError, match=rf"in\.jsonl, row 1: .*{why}"):
        import_rows(rows(tmp_path / "in.jsonl", good, row), str(tmp_path / "out.arrow"), model=model)
    assert not (tmp_path / "out.arrow").exists()

"""Groups that exist already: which are read, how they are named, and what an import makes of rows."""

import json
import struct

import pyarrow as pa
import pytest

from cluster.contracts.config import EvaluationConfig, ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError, DataError, LostError
from cluster.contracts.plugins import Plugin
from cluster.contracts.schema import SCHEMA, with_columns
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder
from cluster.record.run_directory import EVENTS, PASSPORT, RunDirectory
from deploy.learning import _step, learn
from deploy.recorded import RecordedGroups, import_rows
from tests.fakes import ListedEvents
from tests.models import make_tiny_model
from tests.object_store import s3
from tests.unit.cluster.contracts.rows import before, row
from tests.unit.learner.segments import segmented
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


def imported(source: str, out: str, model: ModelConfig, **prompts) -> tuple[int, int]:
    return import_rows(
        source, out, model=model, prompts=Plugin.model_validate({"name": "file", "path": "of the run"} | prompts)
    )


def read(path: str) -> list[dict]:
    with pa.ipc.open_file(path) as reader:
        return reader.read_all().to_pylist()


def run(place: str, model: ModelConfig, folder, **algorithm) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": model.path},
            "prompts": "file",
            "num_steps": 1,
            "recorded": place,
            "metrics": {"sinks": ["jsonl"]},
            "algorithm": algorithm,
        }
    )


@pytest.fixture
def no_actors(monkeypatch):
    """Fails where a run would start its actors."""

    def connected(address, *, run_dir):
        raise AssertionError("the run starts its actors")

    monkeypatch.setattr("deploy.learning.connected", connected)


def opened(place: str, dropped_by=lambda summary: None, *, max_failed_share=0.5) -> RecordedGroups:
    return RecordedGroups.open(place, seed=0, max_failed_share=max_failed_share, dropped_by=dropped_by)


def test_a_group_stays_whole_however_its_file_is_divided_and_two_files_groups_stay_apart(tmp_path):
    group = make_group(3)
    write(tmp_path / "a.arrow", group.slice(0, 1), make_group(4), group.slice(1))
    write(tmp_path / "b.arrow", make_group(3))
    data = opened(str(tmp_path))
    assert len(data) == 3
    assert [data.group(index).num_rows for index in range(3)] == [3, 3, 3]


def test_a_file_at_the_root_is_not_one_of_this_folder(tmp_path, monkeypatch):
    """As a volume of a container may be mounted."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "not-at-the-root.arrow", make_group(3))
    assert len(opened("not-at-the-root.arrow")) == 1
    with pytest.raises(ConfigError, match=r"recorded='/not-at-the-root\.arrow'"):
        opened("/not-at-the-root.arrow")


def test_a_file_without_a_batch_has_no_groups_whatever_its_columns(tmp_path):
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, pa.schema([("x", pa.int64())])):
        pass
    with pytest.raises(ConfigError, match=r"a\.arrow' has 0 groups"):
        opened(str(tmp_path / "a.arrow"))


@pytest.mark.parametrize("out", ["", "s3://", "s3://bucket", "folder/"])
def test_an_import_without_a_file_to_write_is_refused_before_it_reads(tmp_path, model, out):
    with pytest.raises(ConfigError, match=r"names no file; write one such as rows\.arrow"):
        imported(str(tmp_path / "nowhere.jsonl"), out, model)


def test_an_import_into_a_file_that_no_run_would_read_is_refused_before_it_reads(tmp_path, model):
    with pytest.raises(ConfigError, match=r"rows\.bin' does not end with \.arrow.*name it rows\.bin\.arrow"):
        imported(str(tmp_path / "nowhere.jsonl"), str(tmp_path / "rows.bin"), model)


def test_rows_that_are_not_there_are_named_before_the_model_is_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        imported(str(tmp_path / "nowhere.jsonl"), str(tmp_path / "rows.arrow"), ModelConfig(path="no-model"))


def test_an_import_replaces_nothing(tmp_path, model):
    source = rows(tmp_path / "in.jsonl", {"prompt": "2+2", "completion": "4", "reward": 1.0})
    before = (tmp_path / "in.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"in\.jsonl' exists; name another file"):
        imported(source, source, model)
    assert (tmp_path / "in.jsonl").read_text() == before


def test_of_a_run_in_an_object_store_only_what_the_ledger_names_is_learned_from():
    with s3("recorded"):
        run = RunDirectory("s3://recorded/run")
        run.write_file("run.yaml", b"")
        _, (name, digest) = Recorder(run).record(1, make_group(0))
        Ledger(run).append(groups=[0], trajectories=name, trajectories_digest=digest)
        Recorder(run).record(1, make_group(5))
        assert len(run.names("trajectories")) == 2 and len(opened(run.url)) == 1


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


def test_a_group_with_a_larger_share_of_failed_rewards_than_the_run_allows_is_left_out(tmp_path):
    """Three of five failed."""
    group = make_group(0, rewards=(None, 1.0, None, 0.0, None))
    place = write(tmp_path / "a.arrow", group, make_group(1))
    assert [len(opened(place, max_failed_share=share)) for share in (0.59, 0.6)] == [1, 2]


def test_aborted_trajectories_count_no_more_than_they_do_in_the_learner(tmp_path):
    """Else {1, aborted} would pass for a pair. One that failed as well counts as failed: one of three that are left."""
    ends = ("stop", "aborted", "stop", "aborted")
    group = make_group(0, rewards=(1.0, 0.0, 0.5, None), finish_reason=ends)
    all_aborted = make_group(1, rewards=(1.0, 0.0), finish_reason=("aborted", "aborted"))
    place = write(tmp_path / "a.arrow", group, all_aborted)
    data = opened(place)
    assert len(data) == 1 and data.smallest == 2
    assert data.group(0)["reward"].to_pylist() == [1.0, 0.5, None]
    with pytest.raises(ConfigError, match="has 1 groups, and none to learn from"):
        opened(place, max_failed_share=0.3)


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


def test_a_file_whose_lists_end_beyond_it_is_damaged(tmp_path):
    """Seen before: Arrow read beyond the file, and `treadwheel learn` ended by a signal."""
    place = write(tmp_path / "a.arrow", make_group(3))
    content = (tmp_path / "a.arrow").read_bytes()
    ends = struct.pack("<4i", 0, 3, 6, 8)  # of the three completions
    (tmp_path / "a.arrow").write_bytes(content.replace(ends, struct.pack("<4i", 0, 3, 6, 2**30)))
    with pytest.raises(DataError, match=r"a\.arrow: a damaged file of trajectories: "):
        opened(place)


def test_a_file_with_a_damaged_end_is_named_whichever_byte_it_is(tmp_path):
    """Seen before: an OSError of Arrow's, without the file's name."""
    place = write(tmp_path / "a.arrow", make_group(3))
    content, refused = (tmp_path / "a.arrow").read_bytes(), 0
    for at in range(1, 300):
        (tmp_path / "a.arrow").write_bytes(content[:-at] + b"\xff" + content[len(content) - at + 1 :])
        try:
            opened(place)
        except DataError as error:
            assert "a.arrow: " in str(error)
            refused += 1
    assert refused > 100


def test_an_import_writes_tokens_as_the_model_would_have_sampled_them(tmp_path, model):
    lines = (
        {"messages": [{"role": "user", "content": "2+2"}], "completion": "4", "reward": 1, "kind": "sum"},
        {"prompt": "3+3", "completion": "7", "reward": 0.0},
        {"messages": [{"role": "user", "content": "2+2"}], "completion": "5", "reward": 0.5},
    )
    out = str(tmp_path / "out.arrow")
    assert imported(rows(tmp_path / "in.jsonl", *lines), out, model) == (2, 3)
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
    assert imported(rows(tmp_path / "in.jsonl", *lines), str(tmp_path / "out.arrow"), model) == (1, 3)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "reward": 1.0}, "completion is 'None'; it must be a text"),
        ({"prompt": "a", "completion": "b"}, "reward is 'None'; it must be a finite number"),
        ({"prompt": "a", "completion": "b", "reward": True}, "reward is 'True'"),
        ({"prompt": "a", "completion": "b", "reward": 10**400}, "it must be a finite number"),
        ({"prompt": "a", "completion": "", "reward": 1.0}, "has an empty completion"),
        ({"prompt": "a", "completion": "b" * 300, "reward": 1.0}, "shorten or drop it"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(tmp_path, model, row, why):
    good = {"prompt": "a", "completion": "b", "reward": 1.0}
    with pytest.raises(DataError, match=rf"in\.jsonl, row 1: .*{why}"):
        imported(rows(tmp_path / "in.jsonl", good, row), str(tmp_path / "out.arrow"), model)
    assert not (tmp_path / "out.arrow").exists()


def test_a_reward_that_is_no_number_is_named(tmp_path, model):
    good, bad = ({"prompt": "a", "completion": "b", "reward": reward} for reward in (1.0, float("nan")))
    with pytest.raises(ConfigError, match=r"in\.jsonl, row 1, column 'reward': nan has no JSON"):
        imported(rows(tmp_path / "in.jsonl", good, bad), str(tmp_path / "out.arrow"), model)


def test_the_rows_of_an_imported_group_have_one_prompt_id_so_that_a_later_group_finds_their_returns(tmp_path, model):
    lines = [{"prompt": text, "completion": "1", "reward": 1.0} for text in "abab"]
    out = str(tmp_path / "out.arrow")
    assert imported(rows(tmp_path / "in.jsonl", *lines), out, model) == (2, 4)
    assert [row["prompt_id"] for row in read(out)] == ["file/in.jsonl/0"] * 2 + ["file/in.jsonl/1"] * 2


def test_rows_without_a_group_are_grouped_by_their_prompt_though_the_file_has_the_column(tmp_path, model):
    lines = [{"prompt": text, "completion": "1", "reward": 1.0, "group": None} for text in "aba"]
    assert imported(rows(tmp_path / "in.jsonl", *lines), str(tmp_path / "out.arrow"), model) == (2, 3)


def test_an_import_reads_its_file_as_the_run_reads_its_prompts(tmp_path, model):
    line = {"question": "2+2", "completion": "4", "reward": 1.0}
    source, out = rows(tmp_path / "in.jsonl", line), str(tmp_path / "out.arrow")
    assert imported(source, out, model, column="question", system_prompt="add") == (1, 1)
    assert read(out)[0]["prompt_text"] == "system: add<eos>\nuser: 2+2<eos>\nassistant: "
    out, plain = str(tmp_path / "more.arrow"), rows(tmp_path / "plain.jsonl", line | {"prompt": "3"})
    import_rows(plain, out, model=model, prompts=Plugin(name="reasoning_gym"))
    assert read(out)[0]["prompt_text"] == "user: 3<eos>\nassistant: "


def test_a_group_of_which_all_rewards_but_one_failed_is_left_out_as_a_run_that_samples_leaves_it_out(tmp_path):
    alone, single = make_group(0, rewards=(1.0, None)), make_group(1, rewards=(1.0,))
    assert opened(write(tmp_path / "a.arrow", alone, single, make_group(2))).smallest == 1
    assert len(opened(str(tmp_path / "a.arrow"))) == 2
    assert opened(write(tmp_path / "b.arrow", alone, make_group(2, rewards=(1.0, 0.0, None)))).smallest == 2


def test_groups_of_which_only_some_know_their_sampler_are_refused_at_once(tmp_path):
    has = make_group(0, rewards=(1.0, 0.0), lengths=(1, 1), rollout_logprobs=[[-0.5], [-0.5]])
    lacks = make_group(1, rewards=(1.0, 0.0, None), lengths=(1, 1, 1), rollout_logprobs=[None, None, None])
    with pytest.raises(ConfigError, match="2 of 4 trajectories have no rollout_logprobs, the others have"):
        opened(write(tmp_path / "a.arrow", has, lacks))
    unjudged = make_group(1, rewards=(1.0, 0.0, None), lengths=(1, 1, 1), rollout_logprobs=[[-0.5], [-0.5], None])
    assert len(opened(write(tmp_path / "b.arrow", has, unjudged))) == 2, "what failed is not trained on"


def test_segments_of_an_episode_keep_its_number(tmp_path):
    place = write(tmp_path / "a.arrow", segmented((1.0, [1, 2]), (0.0, [1]), (0.5, [1, 1])))
    group = opened(place).group(3)
    assert group["sample_index"].to_pylist() == [0, 0, 1, 2, 2]
    assert group["segment_index"].to_pylist() == [0, 1, 0, 0, 1]


def test_groups_of_the_version_before_are_learned_from(tmp_path):
    old = before(row(), row(sample_index=1, reward=0.0))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, old.schema) as writer:
        writer.write_batch(old)
    assert opened(str(tmp_path / "a.arrow")).group(0)["num_segments"].to_pylist() == [1, 1]


def test_rewards_of_tokens_may_be_known_of_some_trajectories_alone(tmp_path):
    earns = make_group(0, rewards=(1.0, 0.0), lengths=(1, 1), token_rewards=[[1.0], None])
    assert len(opened(write(tmp_path / "a.arrow", earns, make_group(1)))) == 2


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"advantage": "grpo"}, "a recorded group with 1 known reward with advantage='grpo': .* is always 0"),
        ({"advantage": "rloo"}, "a recorded group with 1 known reward with advantage='rloo': .*at least 2"),
    ],
)
def test_a_group_too_small_for_the_advantage_is_refused_before_any_actor_starts(
    tmp_path, model, no_actors, algorithm, message
):
    place = write(tmp_path / "a.arrow", make_group(0), make_group(1, rewards=(1.0,)))
    with pytest.raises(ConfigError, match=rf"recorded='.*a\.arrow': {message}"):
        learn(run(place, model, tmp_path, **algorithm))


def test_what_compares_with_the_sampler_is_refused_of_imported_text_before_any_actor_starts(tmp_path, model, no_actors):
    place = str(tmp_path / "a.arrow")
    imported(
        rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": c, "reward": 1.0} for c in "bc")), place, model
    )
    with pytest.raises(
        ConfigError, match=r"algorithm\.proximal='rollout' .* have no rollout_logprobs; set it to 'recompute'"
    ):
        learn(run(place, model, tmp_path))
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(run(place, model, tmp_path, proximal="recompute"))


def test_a_resumed_run_is_refused_other_data_than_its_steps_were_learned_from(tmp_path, model, no_actors):
    folder = tmp_path / "data"
    folder.mkdir()
    add = lambda name, *texts: imported(
        rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": text, "reward": 1.0} for text in texts)),
        str(folder / name),
        model,
    )
    add("a.arrow", "4", "5")
    config = run(str(folder), model, tmp_path, proximal="recompute")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)
    add("b.arrow", "6", "7")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)  # without a step, a run may begin with anything
    Ledger(RunDirectory(config.run_dir)).append(groups=[0], trajectories="file", trajectories_digest="digest")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)
    (folder / "b.arrow").unlink()
    add("b.arrow", "6", "8")
    with pytest.raises(ConfigError, match=r"has changed since this run began: 2 groups .* then, 2 of .* now"):
        learn(config)


def test_a_resumed_run_is_refused_another_tokenizer_than_it_began_with(tmp_path, model, no_actors):
    place = str(tmp_path / "a.arrow")
    given = ({"prompt": "a", "completion": text, "reward": 1.0} for text in ("4", "5"))
    imported(rows(tmp_path / "in.jsonl", *given), place, model)
    config = run(place, model, tmp_path, proximal="recompute")
    directory = RunDirectory(config.run_dir)
    passport = {"mathematics": {"model": {"tokenizer_digest": "0" * 64}}}
    directory.write_json(PASSPORT, passport)
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)  # without a step, a run may begin with anything
    assert not directory.exists(PASSPORT)
    directory.write_json(PASSPORT, passport)
    Ledger(directory).append(groups=[0], trajectories="file", trajectories_digest="digest")
    with pytest.raises(ConfigError, match="its tokenizer changed since this run began"):
        learn(config)


def test_a_resumed_run_is_refused_where_other_groups_of_the_same_files_train(tmp_path, model, no_actors):
    """Places are those of another order then."""
    source = rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": text, "reward": 1.0} for text in ("4", "5")))
    place = str(tmp_path / "a.arrow")
    imported(source, place, model)
    config = run(place, model, tmp_path, proximal="recompute")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)
    directory = RunDirectory(config.run_dir)
    events = [event | {"num_groups": 2} for event in directory.read_json_lines(EVENTS)]
    directory.replace_lines(EVENTS, [json.dumps(event) for event in events])
    Ledger(directory).append(groups=[0], trajectories="file", trajectories_digest="digest")
    with pytest.raises(ConfigError, match=r"has changed since this run began: 2 groups .* then, 1 of .* now"):
        learn(config)


def test_a_run_of_a_version_that_logged_no_digest_of_its_data_goes_on(tmp_path, model, no_actors):
    place = str(tmp_path / "a.arrow")
    add = lambda *texts: imported(
        rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": text, "reward": 1.0} for text in texts)),
        place,
        model,
    )
    add("4", "5")
    config = run(place, model, tmp_path, proximal="recompute")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)
    directory = RunDirectory(config.run_dir)
    events = [{name: event[name] for name in event if name != "digest"} for event in directory.read_json_lines(EVENTS)]
    directory.replace_lines(EVENTS, [json.dumps(event) for event in events])
    Ledger(directory).append(groups=[0], trajectories="file", trajectories_digest="digest")
    (tmp_path / "a.arrow").unlink()
    add("4", "6")
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)


def test_sections_that_act_on_nothing_where_nothing_is_sampled_are_named(tmp_path, model, no_actors):
    place = str(tmp_path / "a.arrow")
    imported(
        rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": c, "reward": 1.0} for c in "45")), place, model
    )
    config = run(place, model, tmp_path, proximal="recompute")
    told = lambda: [
        event for event in RunDirectory(config.run_dir).read_json_lines(EVENTS) if event["kind"] == "ignored"
    ]
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config)
    assert told() == []
    with pytest.raises(AssertionError, match="starts its actors"):
        learn(config.model_copy(update={"evaluation": EvaluationConfig(num_prompts=7)}))
    assert [event["sections"] for event in told()] == [["evaluation"]]


def test_trajectories_of_another_tokenizer_are_refused(tmp_path, model, no_actors):
    place = str(tmp_path / "a.arrow")
    imported(
        rows(tmp_path / "in.jsonl", *({"prompt": "a", "completion": c, "reward": 1.0} for c in "45")), place, model
    )
    with pa.ipc.open_file(place) as reader:
        batch = reader.get_batch(0)
    other = with_columns(
        batch, completion_token_ids=[[row[0] + 1, *row[1:]] for row in batch["completion_token_ids"].to_pylist()]
    )
    with pytest.raises(
        ConfigError, match=r"the completion '4' has tokens that the tokenizer of model\.path decodes to '5'"
    ):
        learn(run(write(tmp_path / "other.arrow", other), model, tmp_path, proximal="recompute"))


async def test_groups_that_go_with_the_reference_scorers_node_are_made_again_from_the_data(
    tmp_path, model, monkeypatch
):
    """Seen before: the run ended. The node goes once while the groups are scored, and once before they are recorded."""
    monkeypatch.setattr("ray.put", lambda batch: batch)
    lost = iter((True, False, True, False, False))
    asked = []

    class Node:
        async def call_for_batches(self, method, *batches, num_batches, deadline_s):
            return self.held([batch.select([]) for batch in batches], [{"size_bytes": 0}] * num_batches)

        async def update(self, groups):
            return self.held(asked.append([index for index, _ in groups]))

        def held(self, *what):
            if next(lost):
                raise LostError("reference, 'score': its node is gone")
            return what

    place = write(tmp_path / "a.arrow", make_group(0), make_group(1))
    log, node = ListedEvents(), Node()
    summaries, _ = await _step(
        [4, 5], opened(place), run(place, model, tmp_path), reference=node, learner=node, log=log
    )
    assert asked == [[4, 5]] * 2 and [summary.group_id for summary in summaries] == ["00000004", "00000005"]
    assert [event["groups"] for event in log.events if event["kind"] == "groups_lost"] == [[4, 5]] * 2

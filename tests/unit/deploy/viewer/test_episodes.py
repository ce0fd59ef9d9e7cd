"""An episode as blocks: who wrote what, in order, and no label where the messages do not say."""

import json
from typing import Any

import pyarrow as pa
import pytest

from cluster.contracts.errors import DataError
from cluster.record.run_directory import RunDirectory
from deploy.viewer.episodes import Block, Call, Conversation, Rewrite, conversation, last_words
from deploy.viewer.pages.group import group_data
from deploy.viewer.pages.step import step as step_page
from deploy.viewer.pages.trajectory import TokensOfStep
from deploy.viewer.runs import Run
from deploy.viewer.steps import open_step
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.episode_rows import HOSTILE, REWRITTEN, call, episode_rows
from tests.unit.deploy.viewer.recorded import asking
from tests.unit.deploy.viewer.run_files import write_run, write_trajectories

FACTS = {
    "environment": "sums",
    "num_turns": 4,
    "num_calls": 2,
    "num_malformed_calls": 1,
    "failed_stage": "tool:add",
}


def _words(text: str) -> list[int]:
    """A token a word."""
    return [3 + at for at, _ in enumerate(text.split())]


def _talk(*messages: Any, **changed: Any) -> Conversation:
    """Of one segment: two turns of two tokens around two that were written, said by these messages after the question."""
    told = [{"role": "user", "content": "1+1?"}, *messages]
    segment: dict[str, Any] = {
        "segment_index": 0,
        "completion_token_ids": [3] * 6,
        "turns": [{"start": 0, "end": 2, "finish_reason": "stop"}, {"start": 4, "end": 6, "finish_reason": "stop"}],
        "messages": json.dumps(told),
        "token_rewards": None,
        **changed,
    }
    made = conversation([segment])
    assert made is not None
    return made


def _labels(talk: Conversation) -> list[str]:
    return [block.label for block in talk.blocks]


def _said(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **({"tool_calls": list(calls)} if calls else {})}


@pytest.fixture
def run(tmp_path) -> Run:
    """Step 4: an episode of two segments, and then a single turn."""
    folder = write_run(tmp_path / "run")
    write_trajectories(folder, 4, [*episode_rows(_words), row(sample_index=1, reward=0.0)])
    return Run("run", RunDirectory(str(folder)))


def test_turns_and_written_stretches_are_blocks_in_order_over_all_segments(run):
    """Words: call add | 85 error | so 85, and after the history was rewritten: think on | go on please | 85."""
    talk = conversation(open_step(run, 4).segments(7, 0))
    assert talk is not None
    told = [(each.start, each.end, each.turn, each.label, each.finish_reason, each.earned) for each in talk.blocks]
    assert told == [
        (0, 2, 1, "assistant", "stop", 0.5),
        (2, 4, None, f"tool add, tool {HOSTILE}", None, None),
        (4, 6, 2, "assistant", "stop", 0.0),
        (6, 8, 3, "assistant", "length", -0.25),
        (8, 11, None, "user", None, None),
        (11, 12, 4, "assistant", "stop", 1.0),
    ]
    assert talk.rewrites == (Rewrite(start=6, num_tokens=len(REWRITTEN.split()), prompt=REWRITTEN),)
    assert [each.calls for each in talk.blocks if each.calls] == [
        (
            Call(name="add", arguments='{"a": 47, "b": 38}', is_malformed=False),
            Call(name=HOSTILE, arguments='{"a": 47', is_malformed=True),
        )
    ]


def test_turns_that_lie_outside_the_completion_name_the_file(tmp_path):
    folder = write_run(tmp_path / "run")
    file = write_trajectories(folder, 4, [row()])
    with pa.ipc.open_file(file.read_bytes()) as reader:
        batch = reader.get_batch(0)
    place = batch.schema.get_field_index("turns")
    turns = pa.array([[{"start": 1, "end": 9, "finish_reason": "stop"}]], type=batch.schema.field(place).type)
    with pa.ipc.new_file(str(file), batch.schema) as writer:
        writer.write_batch(batch.set_column(place, batch.schema.field(place), turns))
    with pytest.raises(DataError, match=r"step-000004\.arrow: .*'turns': are not spans of the completion"):
        open_step(Run("run", RunDirectory(str(folder))), 4).segments(7, 0)


def test_a_single_turn_is_no_conversation(run):
    step = open_step(run, 4)
    assert conversation(step.segments(7, 1)) is None
    assert TokensOfStep(run, step).of(7, 1)["conversation"] is None


def test_blocks_are_places_of_the_tokens_of_the_page(run):
    tokens = TokensOfStep(run, open_step(run, 4)).of(7, 0)
    blocks = tokens["conversation"]["blocks"]
    assert [tokens["mask"][each["start"] : each["end"]] for each in blocks] == [
        [each["turn"] is not None] * (each["end"] - each["start"]) for each in blocks
    ]
    assert blocks[-1]["end"] == len(tokens["ids"])
    json.dumps(tokens, allow_nan=False)


def test_the_last_messages_of_the_assistant_are_the_turns_and_others_before_them_the_prompt():
    shots = [_said(), {"role": "user", "content": "2+2?"}]
    talk = _talk(*shots, _said(call("add", {})), {"role": "tool", "name": "add", "content": "4"}, _said())
    assert _labels(talk) == ["assistant", "tool add", "assistant"]
    assert [len(block.calls) for block in talk.blocks] == [1, 0, 0]


@pytest.mark.parametrize(
    "messages",
    [
        [_said(call("add", {})), {"role": "user", "content": "a turn is missing"}],
        [_said(), _said(), {"role": "user", "content": "others end"}],
        [_said(), "no message", _said()],
        [],
    ],
)
def test_what_does_not_fit_the_turns_labels_nothing(messages):
    talk = _talk(*messages)
    assert _labels(talk) == ["assistant", "", "assistant"]
    assert not any(block.calls for block in talk.blocks)


@pytest.mark.parametrize("messages", [None, "torn", "7", '{"role": "user"}', "[" * 100_000])
def test_a_column_that_is_not_a_conversation_labels_nothing(messages):
    assert _labels(_talk(messages=messages)) == ["assistant", "", "assistant"]


def test_many_messages_of_one_stretch_are_counted_and_few_named():
    tools = [{"role": "tool", "name": "add", "content": "4"}] * 3
    others = [{"role": "tool", "name": f"t{at}", "content": ""} for at in range(8)]
    assert _labels(_talk(_said(), *tools, *others, _said()))[1] == (
        "tool add ×3, tool t0, tool t1, tool t2, tool t3, tool t4, 3 more"
    )


def test_an_assistants_message_of_the_environment_is_no_turn_where_replies_are_recorded():
    """Sampled were the first and the last: between them the environment shows how it is done."""
    shown = [
        {"role": "user", "content": "2+2?"},
        _said(call("add", {})),
        {"role": "tool", "name": "add", "content": "4"},
    ]
    told = [_said(), *shown, _said()]
    talk = _talk(*told, episode=json.dumps({"replies": [[1, 5]]}))
    assert _labels(talk) == ["assistant", "user, assistant, tool add", "assistant"]
    assert not any(block.calls for block in talk.blocks)
    for not_of_this_episode in ([1, 2], [1], [1, 3, 5], [1, 9]):
        other = json.dumps({"replies": [not_of_this_episode]})
        assert _labels(_talk(*told, episode=other)) == _labels(_talk(*told)) != _labels(talk)


def test_names_and_arguments_that_no_page_can_send_are_replaced():
    odd = json.loads('"\\ud800"')
    talk = _talk(_said(call(odd, {"a": odd}), "no call"), {"role": "tool", "content": ""}, _said())
    assert talk.blocks[0].calls == (Call(name="?", arguments='{"a": "?"}', is_malformed=False),)
    assert talk.blocks[1].label == "tool"


def test_tokens_after_the_last_turn_are_written():
    talk = _talk(_said(), _said(), completion_token_ids=[3] * 7)
    last = Block(start=6, end=7, turn=None, label="", role="", finish_reason=None, earned=None, calls=())
    assert talk.blocks[-1] == last


def test_a_group_and_a_step_say_what_became_of_their_episodes(run):
    first, second = group_data(open_step(run, 4), 7)["trajectories"]
    assert (first["episode"], second["episode"]) == (FACTS, None)
    told = step_page(run, asking(step="4"))["rows"][0]
    assert told["episodes"] == {
        "environment": "sums",
        "fewest_turns": 4,
        "most_turns": 4,
        "num_calls": 2,
        "num_malformed_calls": 1,
        "failed_stages": [("tool:add", 1)],
    }
    assert sorted(dot["episode"] is None for dot in told["dots"]) == [False, True]


def test_of_an_episode_a_group_shows_what_the_model_said_last(run):
    assert open_step(run, 4).completions(7) == {0: "85", 1: row()["completion_text"]}


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([_said(), {"role": "tool", "content": "4"}, _said(call("add", {"a": 1}))], 'x\nadd({"a": 1})'),
        ([{"role": "assistant", "content": "", "tool_calls": [call("add", {})]}], "add({})"),
        ([_said(), {"role": "user", "content": "others end"}], None),
        ([], None),
    ],
)
def test_calls_stand_below_the_last_words_and_messages_that_others_end_have_none(messages, shown):
    told = {"messages": json.dumps(messages), "episode": "{}"}
    assert last_words(told) == shown
    assert last_words(told | {"episode": None}) is None


def test_an_episode_that_ended_before_its_first_turn_has_no_blocks():
    talk = conversation(
        [
            {
                "segment_index": 0,
                "completion_token_ids": [],
                "turns": [],
                "messages": json.dumps([{"role": "user", "content": "1+1?"}]),
                "token_rewards": None,
            }
        ]
    )
    assert talk == Conversation(blocks=(), rewrites=())

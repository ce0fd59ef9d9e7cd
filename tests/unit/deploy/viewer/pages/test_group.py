"""A group's page: the best first, and what all completions begin with told once."""

import json

import pytest

from cluster.record.run_directory import RunDirectory
from deploy.viewer.pages.group import common_beginning, group_data
from deploy.viewer.runs import Run
from deploy.viewer.steps import open_step
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import write_run, write_trajectories

SAME = "Let me think about this one step after the other: "
"""50 characters."""


def _data(tmp_path, *rows: dict, ticket: int = 7, others: tuple[dict, ...] = ()) -> dict:
    folder = write_run(tmp_path / "run")
    write_trajectories(folder, 4, rows, *([other] for other in others))
    return group_data(open_step(Run("run", RunDirectory(str(folder))), 4), ticket)


def test_the_best_reward_comes_first_and_a_failed_judge_last(tmp_path):
    failed = row(sample_index=0, reward=None, reward_status="error", reward_message="KeyError")
    data = _data(tmp_path, failed, row(sample_index=1, reward=-1.0), row(sample_index=2), row(sample_index=3))
    assert [each["sample_index"] for each in data["trajectories"]] == [2, 3, 1, 0]
    assert data["trajectories"][3]["reward_message"] == "KeyError"


def test_neighbours_are_the_groups_of_the_same_step(tmp_path):
    data = _data(tmp_path, row(), others=(row(ticket_index=9, group_id="9"),))
    assert (data["before"], data["after"], data["place"], data["num_groups"]) == (None, 9, 1, 2)


def test_a_prompt_is_a_conversation_where_it_was_one(tmp_path):
    said = [{"role": "user", "content": "1+1?"}]
    data = _data(tmp_path, row(info=json.dumps({"messages": said, "answer": "2"})))
    assert data["prompt"] == {"text": "1+1=", "messages": said, "columns": {"answer": "2"}}


@pytest.mark.parametrize("messages", ["1+1?", [1, 2], [{"content": "1+1?"}]])
def test_what_an_import_calls_messages_need_not_be_a_conversation(tmp_path, messages):
    data = _data(tmp_path, row(info=json.dumps({"messages": messages})))
    assert data["prompt"]["messages"] is None


def test_what_all_begin_with_is_told_once(tmp_path):
    texts = [f"{SAME}{end}" for end in ("seven and two", "seven and three")]
    data = _data(tmp_path, *(row(sample_index=at, completion_text=text) for at, text in enumerate(texts)))
    assert data["folded"] == f"{SAME}seven and "
    assert [each["text"] for each in data["trajectories"]] == ["two", "three"]


@pytest.mark.parametrize("texts", [[SAME + "a"], ["70", "80"], [SAME[:30] + "x", SAME[:30] + "y"], ["", SAME]])
def test_a_short_beginning_or_one_completion_folds_nothing(texts):
    assert common_beginning(texts) == ""


def test_a_completion_that_all_others_go_on_from_is_folded_whole():
    assert common_beginning([SAME[:-3], SAME]) == SAME[:-3]


def test_a_very_long_completion_is_cut_and_the_rest_counted(tmp_path):
    data = _data(tmp_path, row(completion_text="x" * 20_005))
    assert (len(data["trajectories"][0]["text"]), data["trajectories"][0]["num_left_out"]) == (20_000, 5)

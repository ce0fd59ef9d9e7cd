"""One step down to each reward, and the list of steps."""

import pyarrow as pa
import pytest
from starlette.exceptions import HTTPException

from cluster.contracts.learned import LEARNED_SCHEMA, written_learned
from deploy.viewer.pages.step import PER_PAGE, line_of, step, steps
from tests.unit.deploy.viewer import run_files
from tests.unit.deploy.viewer.recorded import asking, group, opened, record
from tests.unit.deploy.viewer.run_files import event, write_run


@pytest.fixture
def run(tmp_path):
    """Two steps. For the second, groups 3 and 4 were dropped; of group 5 one reward failed, and its second trajectory was cut."""
    events = [
        {**event("drop", 1001.0, group_id="00000003", prompt_id="p", reason="zero_variance"), "policy_version": 1},
        {
            **event("failure", 1002.0, actor="rollout-1", failure="death", reason="signal 9", decision="restart"),
            "policy_version": 1,
        },
        event("failure", 1002.0, actor="rollout-0", failure="death", reason="signal 9", decision="restart"),
    ]
    lines = [run_files.step(number, reward__mean=number / 4) for number in (1, 2)]
    folder = write_run(tmp_path / "run", steps=lines, events=events)
    last = group(5, 0.0, 1.0, None, worker="rollout-1", policy_versions=[0, 1, 1])
    last[1] |= {
        "finish_reason": "length",
        "completion_token_ids": [3],
        "loss_mask": [True],
        "policy_versions": [1],
        "rollout_logprobs": [-1.0],
    }
    record(folder, [group(0, 1.0), group(1, 0.0)], [group(2, 0.5, 0.5, policy_versions=[1] * 3), last])
    return opened(folder)


def test_every_reward_that_is_known_is_a_dot_at_its_place(run):
    told = step(run, asking(step="2"))
    assert [
        (dot["sample"], dot["reward"], dot["percent"], dot["finish"]) for row in told["rows"] for dot in row["dots"]
    ] == [
        (0, 0.5, 50.0, "stop"),
        (1, 0.5, 50.0, "stop"),
        (0, 0.0, 0.0, "stop"),
        (1, 1.0, 100.0, "length"),
    ]
    assert told["rows"][1]["span"] == {"mean": 50.0, "start": 0.0, "width": 100.0}


def test_a_row_tells_of_lengths_staleness_worker_and_troubles(run):
    first, second = step(run, asking(step="2"))["rows"]
    named = ("ticket", "mean", "std", "shortest", "longest", "staleness", "workers", "num_cut", "num_failed")
    assert [first[name] for name in named] == [2, 0.5, 0.0, 3, 3, 0, ["rollout-0"], 0, 0]
    assert [second[name] for name in named] == [5, 0.5, 0.5, 1, 3, 1, ["rollout-1"], 1, 1]


def test_what_was_dropped_for_it_is_the_gap_in_the_ledger_with_the_events_reason(run):
    told = step(run, asking(step="2"))["dropped"]
    assert told["tickets"] == [
        {"ticket": 3, "reason": "zero_variance"},
        {"ticket": 4, "reason": "no event says why"},
    ]
    assert step(run, asking(step="1"))["dropped"]["num"] == 0


def test_without_metrics_recorded_steps_have_neighbours_and_groups_dropped_for_the_first_are_told(tmp_path):
    record(folder := write_run(tmp_path / "run"), [group(1, 1.0)], [group(2, 1.0)])
    told = step(opened(folder), asking(step="1"))
    assert (told["previous"], told["next"]) == (None, 2)
    assert [each["ticket"] for each in told["dropped"]["tickets"]] == [0]


def test_failed_rewards_and_what_happened_meanwhile_are_this_steps_alone(run):
    told = step(run, asking(step="2"))
    assert told["failed"] == [
        {"status": "error", "message": "KeyError: 'answer'", "count": 1, "ticket": 5, "sample": 2}
    ]
    assert [mark["actor"] for mark in told["marks"]] == ["rollout-1"]
    assert (told["previous"], told["next"]) == (1, None)
    assert told["facts"] == [{"label": "Reward", "value": 0.5}]


def test_groups_without_a_reward_come_last_and_each_failure_has_its_first_trajectory(tmp_path):
    late = group(3, None, reward_status="timeout", reward_message="overran 5 s")
    record(folder := write_run(tmp_path / "run"), [group(0, None, None), group(1, 1.0), group(2, 0.0), late])
    told = step(opened(folder), asking("sort=reward&from=-5", step="1"))
    assert ([row["ticket"] for row in told["rows"]], told["from"]) == ([2, 1, 0, 3], 0)
    assert [(each["status"], each["count"], each["ticket"], each["sample"]) for each in told["failed"]] == [
        ("error", 2, 0, 0),
        ("timeout", 1, 3, 0),
    ]


def test_groups_are_sorted_as_asked_and_come_in_pages(run, tmp_path):
    longer = {"completion_token_ids": [3] * 4, "loss_mask": [True] * 4, "policy_versions": [0] * 4}
    longer |= {"rollout_logprobs": [-1.0] * 4}
    record(folder := write_run(tmp_path / "long"), [group(0, 1.0), group(1, 1.0, **longer)])
    assert [row["ticket"] for row in step(opened(folder), asking("sort=length", step="1"))["rows"]] == [1, 0]
    assert [row["ticket"] for row in step(run, asking("sort=spread", step="2"))["rows"]] == [5, 2]
    assert [row["ticket"] for row in step(run, asking("sort=reward", step="1"))["rows"]] == [1, 0]
    assert [row["ticket"] for row in step(run, asking("sort=staleness", step="2"))["rows"]] == [5, 2]
    assert step(run, asking("sort=%3Cscript%3E", step="1"))["sort"] == "order"
    folder = write_run(tmp_path / "wide")
    record(folder, [group(ticket, 1.0) for ticket in range(PER_PAGE + 5)])
    told = step(opened(folder), asking(step="1"))
    assert (len(told["rows"]), told["earlier"], told["later"]) == (PER_PAGE, None, PER_PAGE)
    told = step(opened(folder), asking(f"from={PER_PAGE}", step="1"))
    assert (len(told["rows"]), told["earlier"], told["later"]) == (5, 0, None)


def test_a_step_without_trajectories_has_its_numbers_and_one_without_either_is_not_there(tmp_path):
    run = opened(write_run(tmp_path / "run", steps=[run_files.step(1, reward__mean=0.5)]))
    told = step(run, asking(step="1"))
    assert told["why"] == "step 1 is not recorded: this run has no trajectories yet"
    assert (told["rows"], told["facts"]) == ([], [{"label": "Reward", "value": 0.5}])
    with pytest.raises(HTTPException, match="404"):
        step(run, asking(step="2"))


def test_ten_thousand_steps_are_listed_in_pages(tmp_path):
    lines = [run_files.step(number, reward__mean=0.5) for number in range(10_001)]
    run = opened(write_run(tmp_path / "run", steps=lines))
    told = steps(run, asking())
    assert [row["step"] for row in told["rows"]] == list(range(10_000, 10_000 - PER_PAGE, -1))
    assert (told["columns"], told["rows"][0]["numbers"], told["rows"][0]["is_recorded"]) == (["Reward"], [0.5], False)
    assert (told["newer"], told["older"]) == (None, 9_951)
    last = steps(run, asking("before=51"))
    assert (last["rows"][-1]["step"], last["older"], last["newer"]) == (1, 1, 101)
    assert steps(run, asking("before=1"))["older"] is None


def test_a_prompt_is_named_by_its_last_question():
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "How\nmany?"},
    ]
    assert line_of("<|user|>Hi", {"messages": talk}) == "How many?"
    assert line_of("What  is\n1+1?", {}) == "What is 1+1?"
    assert line_of("1+1?", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}) == "1+1?"


def test_what_all_prompts_say_is_said_once(tmp_path):
    folder = write_run(tmp_path / "run")
    rule = "Answer with a number and with nothing else, please."
    record(folder, [group(0, 1.0, prompt_text=f"{rule} 1+1?"), group(1, 1.0, prompt_text=f"{rule} 2+2?")])
    told = step(opened(folder), asking(step="1"))
    assert (told["shared"], [row["prompt"] for row in told["rows"]]) == (f"{rule} ", ["…1+1?", "…2+2?"])


def test_groups_whose_tokens_are_recorded_are_marked_and_a_damaged_record_is_said(run):
    learned = {"ticket_index": 5, "sample_index": 1, "policy_logprobs": [-0.5]}
    batch = pa.RecordBatch.from_pylist([learned], schema=LEARNED_SCHEMA)
    run.directory.write_file("learned/step-000002.arrow", written_learned([batch], policy_version=1))
    told = step(run, asking(step="2"))
    assert (told["num_detailed"], [row["is_detailed"] for row in told["rows"]]) == (1, [False, True])
    run.directory.write_file("learned/step-000002.arrow", b"torn")
    assert "a damaged record of learning" in step(run, asking(step="2"))["damage"]

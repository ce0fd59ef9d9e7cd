"""A trace says what phases.jsonl says, in the form that Perfetto reads."""

import json

import pytest
from typer.testing import CliRunner

from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import RunDirectory
from deploy.cli.application import app
from deploy.viewer.trace import trace, trace_events

PHASES = [
    {"actor": "learner-0", "phase": "waiting for rollouts", "start": 1000.0, "end": 1002.5},
    {"actor": "rollout-10", "phase": "sampling", "start": 1000.0, "end": 1002.0, "step": 0},
    {"actor": "rollout-9", "phase": "sampling", "start": 1000.5, "end": 1002.0, "step": 0},
    {"actor": "learner-0", "phase": "learning", "start": 1002.5, "end": 1004.0, "step": 1},
]
EVENTS = [
    {"time": 1004.0, "kind": "checkpoint", "policy_version": 1},
    {"time": 1001.0, "kind": "recovery", "policy_version": 0, "actor": "rollout-9", "seconds": 0.5},
    {"time": 1001.5, "kind": "broadcast", "policy_version": 0, "digest": "d", "num_workers": 1},
]
METRICS = [{"policy_version": 0, "time": 1002.0}, {"policy_version": 1, "time": 1003.5}]


@pytest.fixture
def run_dir(tmp_path):
    for name, lines in (("phases", PHASES), ("events", EVENTS), ("metrics", METRICS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def slices(events: list[dict]) -> list[tuple]:
    return [(each["pid"], each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]


def test_each_actor_is_a_process_each_phase_a_slice_and_each_event_an_instant():
    events = trace_events(PHASES, EVENTS, begin=1000.0)
    processes = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    assert processes == {"controller": 1, "learner-0": 2, "rollout-9": 3, "rollout-10": 4}
    assert sorted(slices(events)) == [
        (2, "learning", 2_500_000, 1_500_000),
        (2, "waiting for rollouts", 0, 2_500_000),
        (3, "sampling", 500_000, 1_500_000),
        (4, "sampling", 0, 2_000_000),
    ]
    learning = next(each for each in events if each["name"] == "learning")
    assert learning["args"] == {"cause": "busy", "step": 1} and learning["cat"] == "busy"
    instants = {each["name"]: (each["s"], each["pid"], each["ts"]) for each in events if each["ph"] == "i"}
    assert instants == {"checkpoint": ("g", 1, 4_000_000), "recovery": ("p", 3, 1_000_000)}


def test_every_entry_has_what_the_format_asks_for_and_slices_of_a_thread_do_not_overlap():
    torn = [*PHASES, {"actor": "learner-0", "phase": "starting", "start": 1003.9, "end": 1005.0}]
    events = trace_events(torn, EVENTS, begin=1000.0)
    for each in events:
        assert each["ph"] in {"M", "X", "i"} and each["name"]
        assert isinstance(each["pid"], int) and isinstance(each["tid"], int)
        assert each["ph"] == "M" or (isinstance(each["ts"], int) and each["ts"] >= 0)
        assert each["ph"] != "X" or each["dur"] > 0
    ends: dict[tuple, int] = {}
    for each in (each for each in events if each["ph"] == "X"):
        thread = each["pid"], each["tid"]
        assert each["ts"] >= ends.get(thread, 0)
        ends[thread] = each["ts"] + each["dur"]
    assert slices(events)[2] == (2, "starting", 4_000_000, 1_000_000), "what two lines claim is the first one's"


def test_a_step_is_from_when_the_one_before_it_was_logged_until_it_was(run_dir):
    made = trace(RunDirectory(str(run_dir)), steps="1")
    assert made["otherData"]["begins_at_unix_s"] == 1002.0
    assert slices(made["traceEvents"]) == [(1, "waiting for rollouts", 0, 500_000), (1, "learning", 500_000, 1_000_000)]
    assert [each for each in made["traceEvents"] if each["ph"] == "i"] == []
    assert trace(RunDirectory(str(run_dir)), steps="0-1") == made, "no step made version 0"


def test_the_first_step_of_a_run_without_an_evaluation_begins_with_its_actors(run_dir):
    lines = [{"policy_version": 1, "time": 1003.5}, {"policy_version": 2, "time": 1004.0}]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    made = trace(RunDirectory(str(run_dir)), steps="1-2")
    assert made["otherData"]["begins_at_unix_s"] == 1000.0
    assert max(begin + took for _, _, begin, took in slices(made["traceEvents"])) == 4_000_000


def test_phases_may_be_written_in_any_order(run_dir):
    made = trace(RunDirectory(str(run_dir)))
    (run_dir / "phases.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in PHASES[::-1]))
    again = trace(RunDirectory(str(run_dir)))
    assert sorted(slices(again["traceEvents"])) == sorted(slices(made["traceEvents"]))
    assert again["otherData"] == made["otherData"]


def test_the_command_writes_a_file_and_says_what_opens_it(run_dir, tmp_path):
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["trace", str(run_dir), "--out", str(out)])
    assert done.exit_code == 0 and "ui.perfetto.dev" in done.output
    assert len(slices(json.loads(out.read_text())["traceEvents"])) == 4


@pytest.mark.parametrize(
    ("steps", "says"),
    [("ten", "is neither a step"), ("7-9", r"has none of them; it logged steps 0 to 1")],
)
def test_steps_that_are_not_there_are_refused(run_dir, steps, says):
    with pytest.raises(ConfigError, match=says):
        trace(RunDirectory(str(run_dir)), steps=steps)


def test_a_run_without_phases_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no phases\.jsonl"):
        trace(RunDirectory(str(tmp_path)))

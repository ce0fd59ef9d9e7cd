"""How actors are, from what events tell."""

from deploy.viewer import fleet, live
from deploy.viewer.pages.actors import actors
from deploy.viewer.pages.overview import overview
from deploy.viewer.pages.rewards import rewards
from deploy.viewer.pages.step import step as step_page
from deploy.viewer.trace import trace
from tests.unit.deploy.viewer.recorded import asking, opened
from tests.unit.deploy.viewer.run_files import append, event, step, write_run

STARTED = event("started", 10.0, actors={"rollout-10": 2, "rollout-2": 1})
DIED = event(
    "failure", 20.0, actor="rollout-2", failure="death", reason="signal 9\nat ...", actor_pid=1, decision="restart"
)
HEALED = event("recovery", 26.0, actor="rollout-2", actor_pid=7, seconds=6.0)
STATUS = {"time": 30.0, "actors": [{"actor": "rollout-2", "phase": "sampling", "since": 28.0, "policy_version": 3}]}


def _actor(*events, state: str = "running") -> dict:
    return next(actor for actor in fleet.actors(events, STATUS, state=state) if actor["name"] == "rollout-2")


def test_an_actor_that_died_is_dead_until_another_takes_its_place():
    assert _actor(STARTED)["state"] == "healthy"
    dead = _actor(STARTED, DIED)
    assert (dead["state"], dead["trouble"]) == ("dead", "rollout-2: death, signal 9; decided: restart")
    healed = _actor(STARTED, DIED, HEALED)
    assert (healed["state"], healed["num_restarts"], healed["pid"], healed["phase"]) == ("healthy", 1, 7, "sampling")
    assert [(span["state"], span["start"], span["end"]) for span in healed["spans"]] == [
        ("healthy", 10.0, 20.0),
        ("dead", 20.0, 26.0),
        ("healthy", 26.0, None),
    ]


def test_a_reason_that_names_the_actor_stands_alone():
    said = {**DIED, "reason": "rollout-2 died in 'sample': it was killed"}
    assert fleet.words(said) == "rollout-2 died in 'sample': it was killed; decided: restart"


def test_an_actor_that_hangs_and_is_then_replaced_died_once():
    hung = event("hang", 19.0, actor="rollout-2", actor_pid=1, silent_s=10.0)
    assert [span["start"] for span in _actor(STARTED, hung, DIED)["spans"]] == [10.0, 19.0]


def test_one_that_leaves_with_its_node_did_not_fail():
    drained = event(
        "failure", 20.0, actor="rollout-2", failure="termination", reason="node", actor_pid=1, decision="drain"
    )
    assert _actor(STARTED, drained)["state"] == "healthy"
    left = _actor(STARTED, drained, event("worker_left", 21.0, actor="rollout-2"))
    assert (left["state"], left["pid"]) == ("left", 1)


def test_a_worker_that_joins_was_not_restarted_and_one_that_cannot_join_is_away():
    joined = _actor(event("worker_joined", 12.0, actor="rollout-2", seconds=1.0))
    assert (joined["state"], joined["num_restarts"]) == ("healthy", 0)
    assert _actor(STARTED, event("worker_not_joined", 13.0, actor="rollout-2", reason="x"))["state"] == "left"


def test_when_the_run_is_over_nobody_is_well_or_dead():
    over = _actor(STARTED, DIED, event("failed", 25.0, reason="x"), state="failed")
    assert (over["state"], over["phase"], over["spans"][-1]["end"]) == ("ended", None, 25.0)
    assert _actor(STARTED, state="killed")["spans"][-1]["end"] == 30.0, "the last word of a killed run"
    later = [event("held", 40.0), event("held", 35.0)]
    assert _actor(STARTED, *later, state="killed")["spans"][-1]["end"] == 40.0
    killed = _actor(STARTED, event("launched", 15.0))
    assert (killed["state"], killed["spans"][-1]["end"]) == ("ended", 15.0), "by the next driver's start at the latest"


def test_worker_ten_comes_after_worker_two():
    assert [actor["name"] for actor in fleet.actors([STARTED], {}, state="running")] == ["rollout-2", "rollout-10"]


def test_what_comes_with_every_step_is_no_mark():
    marks = fleet.marks([event("broadcast", 1.0, digest="d", num_workers=1), DIED, event("something_new", 3.0)])
    assert [(mark["kind"], mark["tone"], mark["words"]) for mark in marks] == [
        ("failure", "bad", "rollout-2: death, signal 9; decided: restart"),
        ("something_new", "plain", "something new"),
    ]


def test_printed_lines_and_repeated_failures_of_rewards_do_not_displace_a_failure():
    new = event("reward_failure", 3.0, message="prompt 'p0': 1 of 1 rewards failed: KeyError: 'a'")
    noise = [event("printed", 4.0, actor="rollout-0", lines=["debug"], num_more=0), event("reward_failure", 5.0)]
    assert [mark["kind"] for mark in fleet.marks([DIED, new, *noise])] == ["failure", "reward_failure"]


def test_an_event_belongs_to_the_step_on_whose_page_it_is_listed(tmp_path):
    events = [
        {**DIED, "policy_version": 4},
        event("checkpoint", 21.0, policy_version=4),
        event("mismatch_alarm", 22.0, policy_version=4, mean_abs_nats=1.0),
        event("finished", 23.0, policy_version=5),
    ]
    run = opened(write_run(tmp_path / "run", steps=[step(at) for at in range(1, 6)], events=events))
    listed = {mark["kind"]: mark["step"] for mark in overview(run, asking())["events"]}
    assert listed == {"launched": 1, "failure": 5, "checkpoint": 4, "mismatch_alarm": 4, "finished": 5}
    for kind, at in listed.items():
        assert kind in [mark["kind"] for mark in step_page(run, asking(step=str(at)))["marks"]]


def test_a_driver_that_goes_on_begins_where_its_record_ends():
    events = [
        event("launched", 1.0),
        {**event("held", 2.0), "policy_version": 3},
        event("launched", 8.0),
        event("resumed", 9.0, recorded_steps=7),
        event("held", 10.0),
        {**event("held", 11.0), "policy_version": 8},
        event("launched", 12.0),  # begun anew: without a record
        event("held", 13.0),
    ]
    assert [mark["step"] for mark in fleet.marks(fleet.versioned(events))] == [1, 4, 8, 8, 8, 9, 1, 1]


def test_what_happened_after_a_resume_stands_at_its_step_on_every_page(tmp_path):
    failures = [{"kind": "KeyError", "message": "KeyError: 'a'", "count": 1}]
    folder = write_run(tmp_path / "run", steps=[step(7)])
    run = opened(folder)
    before = run.mark()
    later = [
        event("launched", 1008.0),
        event("resumed", 1009.0, recorded_steps=7),
        {**DIED, "time": 1010.0},
        event("reward_failure", 1011.0, group_id="00000009", message="KeyError: 'a'", failures=failures),
    ]
    append(folder / "events.jsonl", later)
    (folder / "phases.jsonl").write_text(
        '{"actor": "rollout-2", "phase": "sampling", "start": 1000.0, "end": 1020.0}\n'
    )
    assert {mark["step"] for mark in live.since(run, before)[1]["marks"]} == {8}
    assert {mark["step"] for mark in overview(run, asking())["marks"][1:]} == {8}
    assert [mark["step"] for mark in actors(run, asking())["marks"]] == [8]
    steps = trace(run.directory)["traceEvents"]
    assert [each["args"]["step"] for each in steps if each["name"] == "failure"] == [8]
    append(folder / "metrics.jsonl", [step(8)])
    assert [mark["kind"] for mark in step_page(run, asking(step="8"))["marks"]][-2:] == ["failure", "reward_failure"]
    (failed,) = rewards(run, asking())["failures"]
    assert (failed["first"], failed["last"]) == (8, 8)


def test_events_of_an_earlier_version_are_told_with_the_facts_that_they_have():
    joined, scaled = event("worker_joined", 1.0, actor="rollout-2"), event("scale", 2.0, before=1, num_workers=3)
    assert fleet.words(joined) == "rollout-2 joined" and fleet.words(scaled) == "1 to 3 rollout workers: "
    assert fleet.words({**joined, "seconds": 1.25}) == "rollout-2 joined after 1.2 s"
    assert fleet.words({**scaled, "actors": "reward_services"}) == "1 to 3 reward services: "

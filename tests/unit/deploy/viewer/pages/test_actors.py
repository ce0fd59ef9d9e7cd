"""A Gantt of few bars that hides nobody's death."""

import pytest

from deploy.viewer.pages import actors
from deploy.viewer.runs import Run
from tests.unit.deploy.viewer.recorded import asking, opened
from tests.unit.deploy.viewer.run_files import append, event, write_run

ALIVE = {"state": "healthy", "start": 0.0, "end": 50.0, "words": None}
DEAD = {"state": "dead", "start": 50.0, "end": None, "words": "signal 9"}


def _phase(name: str, start: float, end: float, actor: str = "rollout-0") -> dict:
    return {"actor": actor, "phase": name, "start": start, "end": end, "step": 1}


def test_bars_and_lives_are_cut_to_the_window():
    found = [{"name": "rollout-0", "spans": [ALIVE, DEAD]}]
    phases = [
        _phase("sampling", 0.0, 10.0),
        _phase("sampling", 45.0, 49.0),
        _phase("learning", 41.0, 44.0, actor="learner-0"),
    ]
    worker, learner = actors.rows(found, phases, begin=40.0, end=60.0)
    assert [(span["state"], span["start"], span["end"]) for span in worker["life"]] == [
        ("healthy", 40.0, 50.0),
        ("dead", 50.0, 60.0),
    ]
    assert [(bar["phase"], bar["start"], bar["color"]) for bar in worker["bars"]] == [("sampling", 45.0, "sampling")]
    assert (learner["actor"], learner["life"], len(learner["bars"])) == ("learner-0", [], 1)


def test_many_short_phases_become_one_bar_of_what_took_most():
    phases = [
        _phase("sampling", 0.0, 3.0),
        _phase("idle", 3.0, 4.0),
        _phase("sampling", 4.0, 7.0),
        _phase("idle", 7.0, 20.0),
    ]
    bars = actors.merged(phases, 8.0)
    assert [(bar["phase"], bar["start"], bar["end"], bar["number"]) for bar in bars] == [
        ("sampling", 0.0, 7.0, 3),
        ("idle", 7.0, 20.0, 1),
    ]
    assert [bar["end"] for bar in actors.merged(phases, 4.0)] == [4.0, 7.0, 20.0]
    assert len(actors.merged(phases, 0.0)) == 4


def test_what_a_living_actor_does_now_is_drawn_from_where_its_lines_end():
    doing = {"name": "rollout-0", "spans": [ALIVE], "phase": "sampling", "phase_since": 30.0}
    idle = {"name": "rollout-1", "spans": [ALIVE], "phase": "idle", "phase_since": 20.0}
    ended = {"name": "rollout-2", "spans": [ALIVE], "phase": None, "phase_since": None}
    phases, found = [_phase("waiting for learner", 10.0, 35.0)], [doing, idle, ended]
    shown = actors.rows(found, [*phases, *actors.present(found, phases, end=50.0)], begin=0.0, end=50.0)
    assert [[(bar["color"], bar["start"], bar["end"]) for bar in row["bars"]] for row in shown] == [
        [("waiting", 10.0, 35.0), ("sampling", 35.0, 50.0)],
        [("waiting", 20.0, 50.0)],
        [],
    ]


def test_hundreds_of_phases_are_shown_one_by_one():
    phases = [_phase("sampling", at, at + 0.5) for at in range(500)]
    (row,) = actors.rows([], phases, begin=0.0, end=500.0)
    assert len(row["bars"]) == 500


def test_of_very_many_events_the_newest_are_listed_the_newest_first(tmp_path):
    events = [event("hang", 1000.0 + at, actor="rollout-0", silent_s=9.0) for at in range(501)]
    marks = actors.actors(opened(write_run(tmp_path / "run", events=events)), asking())["marks"]
    assert (len(marks), marks[0]["time"], marks[-1]["time"]) == (500, 1500.0, 1001.0)


def test_a_run_ends_with_its_last_phase_and_one_that_goes_on_ends_now(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", events=[event("held", 1100.0)])
    append(folder / "phases.jsonl", [_phase("learning", 1000.0, 1200.0), _phase("sampling", 1000.0, 1150.0)])
    assert actors.actors(opened(folder), asking())["end"] == 1200.0
    monkeypatch.setattr(Run, "state", lambda _: "running")
    assert actors.actors(opened(folder), asking())["end"] > 1e9


@pytest.mark.parametrize(
    ("asked", "window", "begins"),
    [("60", "60", 1040.0), ("300", "300", 1000.0), ("all", "all", 1000.0), ("9" * 5000, "all", 1000.0)],
)
def test_a_window_reaches_back_from_the_runs_end_and_one_without_end_is_all(tmp_path, asked, window, begins):
    folder = write_run(tmp_path / "run", events=[event("finished", 1100.0)])
    told = actors.actors(opened(folder), asking(f"window={asked}"))
    assert (told["window"], told["begin"], told["end"]) == (window, begins, 1100.0)

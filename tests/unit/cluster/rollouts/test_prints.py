"""Of what judges and environments print, each line is told once, and not for ever."""

from cluster.contracts.types import Printed, Progress
from cluster.rollouts.prints import Prints
from tests.fakes import ListedEvents


def said(*lines: str, num_lines: int, pid: int = 7) -> Progress:
    printed = Printed(lines=lines, num_lines=num_lines)
    return Progress(
        actor="reward", phase="judging", policy_version=0, since=0.0, last_progress=0.0, pid=pid, printed=printed
    )


def test_a_line_is_told_once_and_how_many_came_before_it():
    events = ListedEvents()
    prints = Prints(events)
    for progress in (said(num_lines=0), said("a", "b", num_lines=2), said("a", "b", num_lines=2)):
        prints.note([progress])
    prints.note([said("b", "c", num_lines=3)])
    prints.note([said("x", "y", "z", num_lines=12)])
    told = [(event["kind"], event["lines"], event["num_more"]) for event in events.events]
    assert told == [("printed", ["a", "b"], 0), ("printed", ["c"], 0), ("printed", ["x", "y", "z"], 6)]


def test_the_process_that_takes_an_actors_place_begins_anew():
    events = ListedEvents()
    prints = Prints(events)
    prints.note([said("a", num_lines=1)])
    prints.note([said("a", num_lines=1, pid=8)])
    assert [event["lines"] for event in events.events] == [["a"], ["a"]]


def test_a_judge_that_always_prints_fills_no_disk():
    events = ListedEvents()
    prints = Prints(events)
    for number in range(1, 2000):
        prints.note([said(str(number), num_lines=number)])
    assert len(events.events) == 1000 and events.events[-1]["lines"] == ["1000"]

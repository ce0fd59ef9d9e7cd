"""What judges gave and where they failed."""

import pytest
from starlette.testclient import TestClient

from deploy.viewer.app import create_app
from deploy.viewer.pages.rewards import failures, rewards
from tests.unit.deploy.viewer.recorded import asking, group, opened, record
from tests.unit.deploy.viewer.run_files import event, step, write_run


def _failure(ticket: int, version: int, kind: str, message: str, count: int) -> dict:
    failures = [{"kind": kind, "message": message, "count": count}]
    told = event("reward_failure", 1001.0, group_id=f"{ticket:08d}", prompt_id="p", num_errors=count, failures=failures)
    return {**told, "policy_version": version}


@pytest.fixture
def told(tmp_path):
    """Group 1 failed and was dropped; groups 2 and 3 trained step 2."""
    events = [
        _failure(1, 0, "KeyError", "KeyError: 'a'", 8),
        _failure(2, 1, "KeyError", "KeyError: 'b'", 1),
        _failure(3, 1, "timeout", "overran 5 s", 2),
    ]
    lines = [
        step(1, reward__mean=0.5, reward__style=0.25, reward__num_errors=0.0),
        step(2, reward__mean=0.75, time__judging_s=0.5),
    ]
    folder = write_run(tmp_path / "run", steps=lines, events=events)
    style = [("style", 0.25)]
    record(
        folder,
        [group(0, 0.0, 1.0)],
        [group(2, 0.5, None, completion_text="two"), group(3, 1.0, reward_components=style, completion_text="three")],
    )
    return rewards(opened(folder), asking())


def test_failures_are_told_by_kind_with_their_messages_and_the_groups_that_trained(told):
    assert told["failures"] == [
        {
            "kind": "KeyError",
            "count": 9,
            "num_groups": 2,
            "first": 1,
            "last": 2,
            "messages": ["KeyError: 'a'", "KeyError: 'b'"],
            "examples": [{"step": 2, "ticket": 2}],
        },
        {
            "kind": "timeout",
            "count": 2,
            "num_groups": 1,
            "first": 2,
            "last": 2,
            "messages": ["overran 5 s"],
            "examples": [{"step": 2, "ticket": 3}],
        },
    ]


def test_a_message_is_told_once_and_a_group_whose_step_is_not_kept_is_no_example(tmp_path):
    record(folder := write_run(tmp_path / "run"), [group(0, None)])
    (told,) = failures([_failure(0, 0, "KeyError", "KeyError: 'a'", 1)] * 2, opened(folder).chain(), set())
    assert (told["count"], told["messages"], told["examples"]) == (2, ["KeyError: 'a'"], [])


def test_a_reward_that_lacks_a_part_is_no_failed_one(tmp_path):
    left = _failure(0, 0, "part left", "kind left the recipe: ValueError: x", 8)
    folder = write_run(tmp_path / "run", events=[left, _failure(1, 0, "KeyError", "KeyError: 'a'", 2)])
    record(folder, [group(0, 1.0)])
    browser = TestClient(create_app([str(folder)]), base_url="http://localhost")
    told = browser.get("/run/run/rewards.json").json()
    assert [(each["kind"], each["count"]) for each in told["failures"]] == [("KeyError", 2)]
    assert [(each["kind"], each["count"]) for each in told["left_parts"]] == [("part left", 8)]
    failed, _, lacking = browser.get("/run/run/rewards").text.partition("Rewards that lack a part")
    assert "KeyError: &#39;a&#39;" in failed and "the learner does not train on the trajectory" in failed
    assert "kind left the recipe: ValueError: x" in lacking and "KeyError" not in lacking
    assert 'href="/run/run/step/1/group/0"' in lacking


def test_the_reward_comes_first_and_every_component_has_its_steps(told):
    assert [each["name"] for each in told["components"]] == ["reward", "style"]
    assert [[column["step"] for column in each["columns"]] for each in told["components"]] == [[1, 2], [2]]
    assert told["components"][0]["last"] == {"num": 2, "num_without": 1, "mean": 0.75, "std": 0.25}


def test_examples_are_the_ends_of_the_newest_step(told):
    assert [(each["name"], each["end"], each["value"], each["ticket"], each["text"]) for each in told["examples"]] == [
        ("reward", "lowest", 0.5, 2, "two"),
        ("reward", "highest", 1.0, 3, "three"),
        ("style", "lowest", 0.25, 3, "three"),
        ("style", "highest", 0.25, 3, "three"),
    ]


def test_curves_are_of_means_and_of_what_failed_if_anything_did(told):
    assert [(panel["title"], [line["label"] for line in panel["lines"]]) for panel in told["panels"]] == [
        ("Means", ["reward", "style"]),
        ("Judging", ["all"]),
    ]


def test_a_run_that_judged_nothing_has_an_empty_page(tmp_path):
    told = rewards(opened(write_run(tmp_path / "run")), asking())
    assert (told["components"], told["failures"], told["panels"], told["examples"]) == ([], [], [], [])


def test_a_panel_says_how_many_of_its_lines_it_shows(tmp_path):
    for number, unit in ((5, ""), (8, "6 of 9")):
        parts = {f"reward__part_{place}": 0.5 for place in range(number)}
        folder = write_run(tmp_path / str(number), steps=[step(1, reward__mean=0.5, **parts)])
        (means,) = rewards(opened(folder), asking())["panels"]
        assert (means["unit"], len(means["lines"])) == (unit, 6)

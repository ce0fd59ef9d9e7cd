"""Runs against each other."""

import math

import pytest
import yaml
from starlette.testclient import TestClient

from deploy.reports import run_list
from deploy.viewer.app import create_app
from deploy.viewer.pages.runs import differences
from tests.unit.deploy.viewer.run_files import event, step, write_run


def test_what_is_equal_is_left_out_and_what_is_absent_is_none():
    assert differences([{"a": 1, "b": [1], "c": 2}, {"a": 1, "b": [2]}]) == [
        {"name": "b", "values": [[1], [2]]},
        {"name": "c", "values": [2, None]},
    ]


def test_two_runs_are_compared_down_to_their_passports(tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        passport = {"mathematics": {"seed": seed, "loss": "ppo"}, "versions": {"torch": f"2.{seed}"}}
        write_run(tmp_path / name, steps=[step(1, reward__mean=0.5 * seed)], passport=passport)
    browser = TestClient(create_app([str(tmp_path)]), base_url="http://localhost")
    told = browser.get("/compare.json?run=one&run=two").json()
    assert told["mathematics"] == [{"name": "mathematics.seed", "values": [1, 2]}]
    assert told["tools"] == [{"name": "versions.torch", "values": ["2.1", "2.2"]}]
    assert told["settings"] == []
    assert [(line["name"], line["points"]) for line in told["panels"][0]["lines"]] == [
        ("one", [[1, 0.5]]),
        ("two", [[1, 1.0]]),
    ]
    page = browser.get("/compare?run=one&run=two")
    assert page.status_code == 200 and "mathematics.seed" in page.text
    assert browser.get("/compare?run=one&run=nothing").status_code == 404
    assert browser.get("/compare").status_code == 400
    assert browser.get("/compare?" + "&".join(f"run={number}" for number in range(7))).status_code == 400
    assert browser.get("/compare.json?run=one&run=two&run=one").json()["runs"] == ["one", "two"]


def test_the_list_of_runs_keeps_few_numbers_of_each_and_says_the_same_when_a_run_was_opened(tmp_path):
    lines = [step(at, reward__mean=at / 8, time__step_s=2.0, other__number=0.5) for at in (1, 2, 3)]
    write_run(tmp_path / "run", steps=lines, events=[event("drop", 1001.0, reason="x"), event("finished", 1002.0)])
    app = create_app([str(tmp_path)])
    browser = TestClient(app, base_url="http://localhost")
    (row,) = browser.get("/runs.json").json()["runs"]
    assert (row["state"], row["reward"], row["step_s"], row["spark"] != "") == ("finished", 0.375, 2.0, True)
    run = app.state.runs.get("run")
    assert run.glance()[0] == {"policy_version": 1, "time": 1001.0, "reward/mean": 0.125, "time/step_s": 2.0}
    assert not run._metrics.is_read and not run._events.is_read
    assert browser.get("/run/run/").status_code == 200 and run._metrics.is_read
    assert browser.get("/runs.json").json()["runs"] == [row]


def test_held_out_in_the_list_of_runs_is_the_last_mean_reward_as_in_treadwheel_runs(tmp_path):
    lines = [step(1, reward__mean=0.5, eval__reward=0.25, eval__accuracy=0.0), step(2, reward__mean=0.75)]
    write_run(tmp_path / "run", steps=lines)
    browser = TestClient(create_app([str(tmp_path)]), base_url="http://localhost")
    (row,) = browser.get("/runs.json").json()["runs"]
    assert row["held_out_reward"] == 0.25
    (listed,) = run_list.listed([str(tmp_path / "run")])
    assert listed.held_out_reward == 0.25
    assert '<td class="number">0.25</td>' in browser.get("/runs").text


def test_every_page_of_a_run_that_has_just_begun_is_there(tmp_path):
    write_run(tmp_path / "run")
    browser = TestClient(create_app([str(tmp_path / "run")]), base_url="http://localhost")
    assert browser.get("/").url.path == "/run/run/"
    for path in ("", "index.json", "actors", "actors.json", "weights", "weights.json"):
        assert browser.get(f"/run/run/{path}").status_code == 200, path


def test_infinite_settings_and_parameters_are_compared_as_words(tmp_path):
    for name, low in (("one", -math.inf), ("two", 0.5)):
        folder = write_run(tmp_path / name, passport={"mathematics": {"corrections": {"low": low}}})
        (folder / "run.yaml").write_text(yaml.safe_dump({"low": low}))
    browser = TestClient(create_app([str(tmp_path)]), base_url="http://localhost")
    told = browser.get("/compare.json?run=one&run=two").json()
    assert told["mathematics"] == [{"name": "mathematics.corrections.low", "values": ["-inf", 0.5]}]
    assert told["settings"] == [{"name": "low", "values": ["-inf", 0.5]}]
    assert "Infinity" not in browser.get("/compare?run=one&run=two").text


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.jsonl", "no JSON\n", "has a line that is not JSON"),
        ("metrics.jsonl", "[1]\n", ""),
        ("metrics.jsonl", '{"time": 1.0}\n', "policy_version"),
        ("run.yaml", "model: {path", "is not the settings of a run: while parsing"),
        ("run.yaml", "half a word", "is not the settings of a run: it holds 'half a word'"),
    ],
)
def test_a_damaged_run_is_listed_as_such_and_hides_no_other(tmp_path, file, content, says):
    write_run(tmp_path / "one", steps=[step(1, reward__mean=0.5)])
    (write_run(tmp_path / "two") / file).write_text(content)
    browser = TestClient(create_app([str(tmp_path)]), base_url="http://localhost")
    one, two = browser.get("/runs.json").json()["runs"]
    assert (one["state"], one["reward"], one["reason"]) == ("killed", 0.5, None)
    assert (two["state"], two["reward"]) == ("damaged", None) and says in two["reason"]
    assert 'data-state="damaged"' in browser.get("/runs").text


def test_a_run_whose_settings_are_torn_says_so_on_its_page(tmp_path):
    (write_run(tmp_path / "run") / "run.yaml").write_text("model: {path")
    browser = TestClient(create_app([str(tmp_path)]), base_url="http://localhost")
    answer = browser.get("/run/run/")
    assert answer.status_code == 500 and "is not the settings of a run" in answer.text

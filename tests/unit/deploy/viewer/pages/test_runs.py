"""Runs against each other."""

import math

import yaml
from starlette.testclient import TestClient

from deploy.viewer.app import create_app
from deploy.viewer.pages.runs import differences
from tests.unit.deploy.viewer.run_files import step, write_run


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

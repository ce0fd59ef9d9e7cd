import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cluster.contracts.errors import ConfigError, StorageError
from cluster.record.run_directory import REPORT, RunDirectory
from cluster.record.storage import Storage
from deploy.config.loading import resolved_yaml, validated
from deploy.reports import curves
from deploy.reports.report import html, leave, state_of, write
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import append, event, release_when_read, step, write_run, write_trajectories

HOSTILE = "</pre><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>"
PASSPORT = {"mathematics": {"seed": 0}, "learner": {}, "versions": {"torch": "2.13.0"}}
FAILED = {"actor": "rollout-1", "failure": "death", "reason": f"signal 9 {HOSTILE}", "decision": "restart"}


class Tags(HTMLParser):
    """Names of all tags, their attributes, and the text outside of style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.text += " "
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data if self.names[-1:] != ["style"] else ""

    @property
    def said(self) -> str:
        return " ".join(self.text.split())


def write_whole_run(folder: Path, *, steps=(), events=(), **files) -> RunDirectory:
    write_run(folder, steps=steps, events=events, **files)
    settings = {"model": {"path": "a/model"}, "prompts": "file", "num_steps": 10, "run_dir": str(folder)}
    (folder / "run.yaml").write_text(resolved_yaml(validated(settings)))
    return RunDirectory(str(folder))


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """Ten steps, two evaluations, a failure that was healed, a judge that failed once; what models and prompts say is hostile."""
    steps = [step(0, eval__reward=0.25, eval__reward_stderr=0.05, eval__accuracy=0.25, eval__num_prompts=64.0)]
    steps += [
        step(version, reward__mean=version / 10, reward__tidy=0.5, time__step_s=6.0, time__learning_s=3.0)
        for version in range(1, 11)
    ]
    steps[-1] |= {"eval/reward": 0.75, "eval/reward_stderr": 0.05, "eval/accuracy": 0.75, "eval/num_prompts": 64.0}
    failures = [{"kind": "right: ValueError", "count": 2, "message": f"right: ValueError: {HOSTILE}"}]
    events = [
        event("failure", 1004.0, **FAILED),
        event("recovery", 1010.0, actor="rollout-1", seconds=6.0),
        event("rewards_failed", 1011.0, failures=failures),
        event("finished", 1060.0),
    ]
    directory = write_whole_run(tmp_path / "run", steps=steps, events=events, passport=PASSPORT)
    for number in (1, 10):
        sampled = [row(sample_index=at, prompt_text=f"1+1={HOSTILE}", completion_text=HOSTILE) for at in range(3)]
        sampled[0] |= {"reward": None, "reward_status": "error", "reward_message": HOSTILE}
        write_trajectories(tmp_path / "run", number, sampled)
    return directory


def test_a_report_says_what_ran_what_came_of_it_and_how_to_go_on(run):
    said = Tags(html(run)).said
    assert "run finished" in said and "10 of 10" in said
    assert "Base model a/model, trained as bfloat16" in said and "groups_per_step: 64" in said
    assert "0 64 0.250 ± 0.050 0.250" in said and "10 64 0.750 ± 0.050 0.750" in said
    assert "rollout-1 serves again after 6.0 s" in said and "2 × right: ValueError" in said
    assert f"treadwheel verify {run.url}" in said and f"treadwheel train {run.url}/run.yaml" in said
    assert "All steps 1 min 0 s" in said and "The learner learned 30.0 s 50 %" in said
    assert "torch 2.13.0" in said and "SHA-256 of its mathematics:" in said


def test_a_long_run_shows_its_last_evaluations_and_says_how_many_there_are(tmp_path):
    steps = [step(version, eval__reward=0.5, tokens__sampled=10.0, time__eval_s=1.0) for version in range(50)]
    said = Tags(html(write_whole_run(tmp_path / "run", steps=steps))).said
    assert "The last 40 of 50; all are in metrics.jsonl." in said and "were evaluated 50.0 s 1 driver," in said
    assert "The steps consumed 500 sampled tokens and trained on 0. Tokens of dropped groups are not counted." in said


def test_the_report_of_a_copy_goes_on_with_the_copy(run, tmp_path):
    """Seen in review: its command went on with the run that it is a copy of, which `run.yaml` names."""
    shutil.copytree(run.path(), tmp_path / "my copy")
    said = Tags(html(RunDirectory(str(tmp_path / "my copy")))).said
    assert f"treadwheel train '{tmp_path}/my copy/run.yaml' 'run_dir={tmp_path}/my copy' Evaluate" in said
    assert f"treadwheel train {run.url}/run.yaml Evaluate" in Tags(html(run)).said


def test_samples_of_the_first_and_the_last_step_stand_side_by_side(run):
    said = Tags(html(run)).said
    assert "Groups whose prompts are in both steps. Of each group the first 2 completions are shown" in said
    first, last = said.index("Step 1 Prompt · mean reward of its group 1.000"), said.index("Step 10 Prompt")
    assert first < last
    assert said.count("no reward 3 tokens, ended by stop; </pre><script>") == 2


def test_samples_are_of_the_prompts_that_are_in_both_steps(tmp_path):
    directory = write_whole_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)])
    alone = row(ticket_index=3, group_id="00000003", prompt_id="p/3", prompt_text="in one step")
    write_trajectories(tmp_path / "run", 1, [alone], [row(prompt_text="in both steps")])
    write_trajectories(tmp_path / "run", 2, [row(prompt_text="in both steps")])
    said = Tags(html(directory)).said
    assert said.count("its group 1.000 in both steps") == 2 and "in one step" not in said


def test_whatever_a_run_holds_is_text(run):
    tags = Tags(html(run))
    assert tags.text.count(HOSTILE) >= 8
    assert {"script", "img", "iframe", "a", "form", "object"}.isdisjoint(tags.names)
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name in ("style", "src", "srcset")]


def test_no_error_brings_a_secret_into_a_page_that_is_sent(tmp_path):
    """Seen before: what a judge raised stood in the report as it was raised, with the key in its URL."""
    said = "HTTPStatusError: 401 for url 'https://judge.example/v1?api_key=abc123', Authorization: Bearer abc123"
    failed = event("rewards_failed", 1001.0, failures=[{"kind": "HTTPStatusError", "count": 2, "message": said}])
    events = [failed, event("failure", 1002.0, **FAILED | {"reason": said}), event("failed", 1003.0, reason=said)]
    directory = write_whole_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)], events=events)
    write_trajectories(tmp_path / "run", 1, [row(reward=None, reward_status="error", reward_message=said)])
    page = html(directory)
    assert page.count("judge.example/v1?api_key=&lt;hidden&gt;") >= 5 and "abc123" not in page


def test_a_report_asks_nobody_for_anything(run):
    page = html(run)
    links = [value for name, value in Tags(page).attributes if name in ("href", "xlink:href", "action")]
    style = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert links == ["data:,"] and len(style) == 1 and "url(" not in style[0] and "@import" not in style[0]
    assert f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:" in page.replace("&#39;", "'")


def test_a_run_without_evaluations_and_without_trajectories_claims_nothing(tmp_path):
    directory = write_whole_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)], events=[event("stopped", 1002.0)])
    said = Tags(html(directory)).said
    assert "run stopped" in said and "This run was not evaluated on held-out prompts" in said
    assert "There are no samples: no step is recorded yet." in said
    assert "Nothing failed" not in said and "There is none: the run had not begun to learn." in said


def test_trajectories_whose_reward_lacks_a_part_trained(tmp_path):
    left = {"kind": "part left", "count": 8, "message": "kind left the recipe: ValueError: x"}
    told = event("reward_failure", 1002.0, failures=[left])
    said = Tags(html(write_whole_run(tmp_path / "run", steps=[step(1, reward__mean=0.5)], events=[told]))).said
    assert "which trained on its other parts. 8 × kind left the recipe" in said and "A failed reward" not in said


def test_every_interruption_counts_however_many_a_curve_has_room_for(tmp_path):
    """Seen before: those of one step counted once, and more than 60 steps with one as 60. A hang is told, and then the failure it is."""
    events = [event("failure", 1001.0 + at, **FAILED) | {"policy_version": at // 2} for at in range(200)]
    events += [event("hang", 1300.0, actor="rollout-0", silent_s=60.0), event("failure", 1300.0, **FAILED)]
    events += [event("launched", 1400.0), event("resumed", 1401.0, recorded_steps=99)]
    said = Tags(html(write_whole_run(tmp_path / "run", steps=[step(100)], events=events))).said
    assert "Interruptions 202 " in said


def test_a_run_of_no_steps_has_a_report_too(tmp_path):
    said = Tags(html(write_whole_run(tmp_path / "run"))).said
    assert "No step has been learned yet." in said and "Nothing failed, and nothing was restarted." in said


def test_samples_whose_file_is_damaged_are_told_of(run, tmp_path):
    (tmp_path / "run" / "trajectories" / "step-000010.arrow").write_bytes(b"ARROW1")
    assert "There are no samples:" in (said := Tags(html(run)).said) and "is damaged" in said


def test_rewards_as_large_as_a_float_can_be_have_a_report(tmp_path):
    folder = tmp_path / "run"
    directory = write_whole_run(folder, steps=[step(at, reward__mean=(-1.0) ** at * 1.7e308) for at in range(1, 13)])
    write_trajectories(folder, 1, [row(sample_index=at, reward=1.7e308) for at in range(3)])
    said = Tags(html(directory)).said
    assert "12 of 10" in said and "mean reward of its group 169,999," in said


def test_it_is_written_where_it_is_asked_for(run, tmp_path):
    assert write(run) == run.path(REPORT) and "10 of 10" in Tags(run.read_text(REPORT)).said
    out = tmp_path / "elsewhere.html"
    assert write(run, str(out)) == str(out) and out.read_text().startswith("<!doctype html>")
    with pytest.raises(StorageError, match=r"--out='/nowhere/r\.html' cannot be written"):
        write(run, "/nowhere/r.html")
    with pytest.raises(ConfigError, match="holds no run"):
        write(RunDirectory(str(tmp_path)))


def test_a_half_of_a_character_in_an_error_keeps_no_run_from_its_report(run, tmp_path):
    append(tmp_path / "run/events.jsonl", [event("failed", 1070.0, reason="a judge said \ud83d")])
    write(run)
    assert "a judge said ?" in run.read_text(REPORT)


def test_a_run_leaves_report_and_curves_and_reads_its_metrics_once(run, capsys, monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(
        RunDirectory, "read_lines", lambda self, name: read.append(name) or Storage.read_lines(self, name)
    )
    leave(run)
    assert run.exists(REPORT) and run.exists("curves.png") and capsys.readouterr().err == ""
    assert read.count("metrics.jsonl") == 1


def test_a_run_that_cannot_be_reported_ends_as_it_would_have(run, tmp_path, capsys):
    append(tmp_path / "run" / "events.jsonl", [{"kind": "failure", "time": 1.0}])
    leave(run)
    assert not run.exists(REPORT)
    assert capsys.readouterr().err.splitlines() == [
        f"treadwheel: {name} was not written: DamagedError: {run.path('events.jsonl')} line 6 has no 'actor'; take that line out, or bring "
        "the file back from a copy"
        for name in ("curves.png", "report.html")
    ]


def test_curves_that_cannot_be_drawn_keep_no_run_from_its_report(run, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("Axis limits cannot be NaN or Inf")

    monkeypatch.setattr(curves, "page", fail)
    leave(run)
    assert run.exists(REPORT) and not run.exists("curves.png")
    assert capsys.readouterr().err.startswith("treadwheel: curves.png was not written: ValueError: Axis limits")


def test_a_run_that_never_measured_anything_leaves_none(tmp_path):
    directory = write_whole_run(tmp_path / "run")
    directory.remove("metrics.jsonl")
    leave(directory)
    assert not directory.exists(REPORT)


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([], "starting"),
        (["launched"], "killed"),
        (["launched", "failed"], "failed"),
        (["launched", "finished", "launched", "stopped"], "stopped"),
    ],
)
def test_a_report_says_how_the_last_driver_ended(kinds, state):
    assert state_of([event(kind, 1.0) for kind in kinds], owner=None) == state


def test_a_living_run_is_running():
    assert state_of([event("launched", 1100.0)], owner="process 4711 on node-1") == "running"


def test_a_run_that_ends_while_it_is_read_was_not_killed(run, monkeypatch):
    """It logs its end before it gives the directory back."""
    append(Path(run.path("events.jsonl")), [event("launched", 1100.0)])
    run.claim(run.read_text("run.yaml"))
    release_when_read(run, monkeypatch)
    assert 'data-state="running"' in html(run)

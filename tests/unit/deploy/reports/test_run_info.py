import io
import json
import math

import pytest
from rich.console import Console

from cluster.contracts.errors import ConfigError, DamagedError
from cluster.record.run_directory import EVENTS, METRICS, RUN_YAML, STATUS, VERDICTS, RunDirectory
from deploy.config.loading import resolved_yaml, validated
from deploy.preflight.settings import check_run_dir
from deploy.reports.passport import is_mathematical
from deploy.reports.run_info import config_of, passport_differences, print_summary, table
from deploy.reports.summary import summarize
from tests.fakes import run_config
from tests.unit.deploy.viewer.run_files import release_when_read

FAILURE = {"kind": "failure", "time": 2.0, "actor": "rollout-0", "failure": "death", "decision": "restart"}


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(str(tmp_path))
    directory.claim(resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", "num_steps": 40})))
    yield directory
    directory.release()


def shown(directory: RunDirectory) -> str:
    out = io.StringIO()
    Console(file=out, width=200, markup=False, emoji=False).print(table(directory))
    return out.getvalue()


def test_a_run_tells_where_it_stands(directory):
    directory.append_json(METRICS, {"policy_version": 1, "time": 1.0, "reward/mean": 0.125, "eval/accuracy": 0.25})
    directory.append_json(METRICS, {"policy_version": 7, "time": 2.0, "reward/mean": 0.5})
    directory.append_json(EVENTS, {**FAILURE, "time": 1.0, "reason": "rollout-1 died"})
    directory.append_json(EVENTS, {**FAILURE, "reason": "x", "message": "rollout-0 died"})
    for _ in range(2):
        directory.append_json(VERDICTS, {})
    rows = [" ".join(line.split()) for line in shown(directory).splitlines()]
    assert {"steps 7 of 40", "reward/mean 0.5", "eval/accuracy 0.25", "verdicts kept 2"} <= {*rows}
    (failures,) = (row for row in rows if row.startswith("event failure 2, last "))
    assert failures.endswith(" ago rollout-0 died")


def test_what_a_model_wrote_into_an_error_does_nothing_to_the_terminal(directory):
    reason = "judge said \x1b[2J\x1b]0;owned\x07\x1b[31m[/INST]\x9b1m\x7f\ud83d, twice\nsecond line"
    directory.append_json(EVENTS, {**FAILURE, "reason": reason})
    directory.append_json(EVENTS, {"kind": "failed", "time": 3.0, "reason": reason})
    text = shown(directory)
    assert text.count("judge said [/INST]1m?, twice") == 2 and "second line" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"model: {path: a", "run.yaml line 1, column 16 cannot be read as YAML"),
        (b"model: \xff", "run.yaml is damaged: 'utf-8' codec"),
        (b"", "run.yaml is damaged: it holds no settings, but 'None'"),
    ],
)
def test_a_damaged_run_is_named_by_its_file(directory, content, why):
    directory.write_file(RUN_YAML, content)
    for read in (table, lambda directory: check_run_dir(run_config(run_dir=directory.url))):
        with pytest.raises(ConfigError, match=why):
            read(directory)


def test_a_run_tells_what_its_actors_time_went_to(directory):
    for version, (busy, learner, restart) in enumerate([(1800.0, 0.0, 0.0), (900.0, 540.0, 360.0)], start=1):
        spent = {"busy_s": busy, "learner_s": learner, "restart_s": restart}
        spent = {f"cost/rollout_worker/{cause}": seconds for cause, seconds in spent.items()}
        gpus = {"cost/gpu_hours": 0.5, "cost/idle_gpu_hours": learner / 3600}
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0, **spent, **gpus})
    rows = [" ".join(line.split()) for line in shown(directory).splitlines()]
    assert "time of rollout worker 1:00:00: busy 75%, waits for learner 15%, start or restart 10%" in rows
    assert "idle GPU-hours 0.15 of 1" in rows


def test_only_whole_checkpoints_are_listed(directory, tmp_path):
    for name in ("step-000010", "step-000020", ".step-000030.saving", "step-000005.bad"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (listed,) = (line.split() for line in shown(directory).splitlines() if line.split()[:1] == ["checkpoints"])
    assert listed == ["checkpoints", "step-000010,", "step-000020"]


def test_a_living_run_tells_what_everyone_does(directory):
    actor = {"actor": "rollout-0", "phase": "sampling", "since": 0.0, "policy_version": 3}
    directory.write_json(STATUS, {"time": 1.0, "actors": [actor]})
    assert "sampling for" in shown(directory)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"kind": "finished"}, "none: the run is finished"),
        ({"kind": "stopped"}, "none: the run was stopped"),
        ({"kind": "failed", "reason": "disk full"}, "none: the run failed: disk full"),
        ({"kind": "launched"}, "none: it was killed"),
    ],
)
def test_a_run_without_a_driver_tells_how_it_ended(directory, end, told):
    directory.append_json(EVENTS, {"kind": "launched", "time": 0.0})
    directory.append_json(EVENTS, {**end, "time": 1.0})
    directory.append_json(EVENTS, {"kind": "preempted", "time": 2.0})
    actor = {"actor": "rollout-0", "phase": "sampling", "since": 0.0, "policy_version": 3}
    directory.write_json(STATUS, {"time": 1.0, "actors": [actor]})
    directory.release()
    assert told in shown(directory) and "sampling" not in shown(directory)


def test_a_run_that_ends_while_it_is_read_was_not_killed(directory, monkeypatch):
    """It logs its end before it gives the directory back."""
    directory.append_json(EVENTS, {"kind": "launched", "time": 0.0})
    release_when_read(directory, monkeypatch)
    assert "driver          process" in shown(directory)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        table(RunDirectory(str(tmp_path)))


def test_passports_differ_where_the_mathematics_does(tmp_path):
    # Passports of earlier versions have infinite numbers, and later ones words.
    for name, epsilon, low, version in (("a", 1e-6, -math.inf, "2.0"), ("b", 1e-4, "-inf", "2.1")):
        (tmp_path / name).mkdir()
        advantage = {"name": "grpo", "epsilon": epsilon, "low": low}
        passport = {"mathematics": {"advantage": advantage}, "versions": {"torch": version}}
        (tmp_path / name / "passport.json").write_text(json.dumps(passport))
    differences = passport_differences(str(tmp_path / "a"), str(tmp_path / "b" / "passport.json"))
    assert differences == {"mathematics.advantage.epsilon": (1e-6, 1e-4), "versions.torch": ("2.0", "2.1")}
    assert [name for name in differences if is_mathematical(name)] == ["mathematics.advantage.epsilon"]


def test_a_run_directory_may_be_named_as_a_passport_is_and_another_file_is_no_passport(tmp_path):
    passport, other = {"mathematics": {"seed": 0}, "versions": {}}, {"num_steps": 20}
    (tmp_path / "run.json").mkdir()
    (tmp_path / "run.json" / "passport.json").write_text(json.dumps(passport))
    (tmp_path / "summary.json").write_text(json.dumps(other))
    assert passport_differences(*[str(tmp_path / "run.json")] * 2) == {}
    with pytest.raises(ConfigError, match=r"summary\.json' has no passport; name a run directory"):
        passport_differences(*[str(tmp_path / "summary.json")] * 2)


def test_why_rewards_failed_is_told_with_counts(directory):
    typo = {"kind": "KeyError", "message": "KeyError: 'anser'", "count": 4}
    late = {"kind": "timeout", "message": "no reward within 30 s", "count": 1}
    directory.append_json(EVENTS, {"kind": "reward_failure", "time": 1.0, "failures": [typo, late]})
    directory.append_json(
        EVENTS, {"kind": "reward_failure", "time": 2.0, "failures": [{**typo, "message": "KeyError: 'x'"}]}
    )
    text = shown(directory)
    assert (
        "8 times KeyError, first: 'anser'" in text
        and "without a part" not in text
        and "1 times no reward within 30 s" in text
    )


def test_a_reward_that_lacks_a_part_did_not_fail(directory):
    left = {"kind": "part left", "message": "kind left the recipe: ValueError: x", "count": 8}
    directory.append_json(EVENTS, {"kind": "reward_failure", "time": 1.0, "failures": [left]})
    text = shown(directory)
    assert "rewards without a part" in text and "8 times kind left the recipe" in text and "failed rewards" not in text


def test_a_status_that_is_damaged_is_named(directory):
    """Seen before: `info` ended with a TypeError."""
    directory.write_json(STATUS, {"time": 1.0, "actors": None})
    with pytest.raises(DamagedError, match=r"status\.json has actors=None, which is not a list; remove the file"):
        shown(directory)


@pytest.mark.parametrize("was_in", ["/gone/first", "s3://bucket/first"])
def test_a_moved_run_finds_the_rows_that_a_script_gave_in_its_own_directory(tmp_path, was_in):
    rows = "prompts-0123456789ab.jsonl"
    settings = f"run_dir: {was_in}\nmodel: {{path: m}}\nprompts: {{name: file, path: '{was_in}/{rows}'}}\n"
    (tmp_path / "run.yaml").write_text(settings)
    directory = RunDirectory(str(tmp_path))
    assert config_of(directory).prompts.params["path"] == f"{was_in}/{rows}", "nothing else to name"
    (tmp_path / rows).write_text('{"prompt": "1+1="}\n')
    assert config_of(directory).prompts.params["path"] == str(tmp_path / rows)
    assert config_of(directory, ["prompts.path=own.jsonl"]).prompts.params["path"] == "own.jsonl"


def test_a_parameter_that_an_earlier_version_left_to_its_variant_is_not_filled_in(tmp_path):
    """Seen in review: a replay of such a run divided by another length than the run did, and told only that the weights differ."""
    settings = "model: {path: m}\nprompts: file\nalgorithm: {aggregation: sequence_sum_over_length}\n"
    (tmp_path / "run.yaml").write_text(settings)
    directory = RunDirectory(str(tmp_path))
    assert config_of(directory).algorithm.aggregation.params == {}
    assert config_of(directory, ["algorithm.aggregation=sequence_sum_over_length"]).algorithm.aggregation.params != {}


@pytest.mark.parametrize(("reward", "lines"), [(0.9, 2), (0.0, 1)])
def test_the_last_lines_have_the_held_out_reward_where_it_is_not_the_accuracy(directory, capsys, reward, lines):
    """Seen before: a judge whose best reward is 0.9 ended with `held-out accuracy: 0.000 -> 0.000` alone."""
    for version, held_out in ((0, 0.0), (1, reward)):
        evaluated = {"eval/reward": held_out, "eval/accuracy": 0.0}
        directory.append_json(METRICS, {"policy_version": version, "time": 1.0, **evaluated})
    print_summary(directory, summarize(directory))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out")]
    assert said == ["held-out reward: 0.000 -> 0.900", "held-out accuracy: 0.000 -> 0.000"][-lines:]

"""The command line as a user meets it: what cannot work ends before anything starts, with one message and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner, Result

from deploy.cli import app
from deploy.config.loading import load, resolved_yaml
from tests.models import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_file(tmp_path, model) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    run = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": {"name": "file", "path": str(tmp_path / "prompts.jsonl")},
        "sampling": {"max_tokens": 8},
        "metrics": {"sinks": ["jsonl"]},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def treadwheel(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_check_shows_what_a_run_will_be(run_file):
    result = treadwheel("check", run_file)
    assert result.exit_code == 0, result.output
    for shown in ("64 groups x 8 = 512", "rollout_worker-0", "GiB", "ppo_clip"):
        assert shown in result.output
    assert not (run_file.parent / "run").exists()


MISTAKES = [
    ("buffer.group_per_step=8", "buffer.group_per_step=8 is not a setting", "did you mean buffer.groups_per_step?"),
    ("num_steps=many", "num_steps='many' is not valid", "it must be a whole number"),
    ("model.path=/no/such/model", "model.path='/no/such/model' does not exist", "give a Hugging Face folder"),
    ("model.path=HERE", "model.path='HERE' has no config.json", "give a Hugging Face model folder"),
    (
        "prompts.path=/no/such.jsonl",
        "prompts='file': path='/no/such.jsonl' cannot be read",
        "name a file that is there",
    ),
    (
        "prompts.column=question",
        "row 0: no 'question'",
        "name the prompt's column with column: NAME, as in prompts.column=NAME",
    ),
    ("prompts.path=EMPTY", "prompts='file': path='EMPTY' has no rows", "give one with at least one prompt"),
    ("prompts.colour=red", "prompts.colour='red' is not a parameter of 'file'", "it takes: path, column"),
    ("prompts.path=LONG", "prompt 'file/long.jsonl/1' has 402 tokens", "shorten or drop the prompt"),
    ("evaluation.prompts={name: file, path: EMPTY}", "evaluation.prompts='file': path='EMPTY'", "give one with"),
    (
        "evaluation.prompts={name: file, path: LONG}",
        "evaluation.prompts: prompt 'file/long.jsonl/1'",
        "shorten or drop",
    ),
    (
        "sampling.max_tokens=300",
        "sampling.max_tokens=300 leaves no room for a prompt",
        "lower it, or raise model.max",
    ),
    (
        "reward.judge=my_rewards:judge",
        "reward.judge='my_rewards:judge' does not import",
        "start the command in the folder of my_rewards.py",
    ),
    ("reward.judge=exact_mach", "reward.judge='exact_mach' is not there", "did you mean 'exact_match'?"),
    ("reward.judge.answer_column=solution", "reward.judge.answer_column='solution' is not", "it takes: column"),
    (
        "reward.judge.column=solution",
        "reward.judge='exact_match' fails on each of 4 samples, the first time with: DataError",
        "(its parameter `columns` has, for the prompt 'file/prompts.jsonl/0': answer)",
    ),
    (
        "algorithm.advantage=grop",
        "advantage='grop' is not there; did you mean 'grpo'?",
        "learner.algorithms.advantages has: cpgd, ",
    ),
    (
        "metrics.sinks=[carrier_pigeon]",
        "metrics.sinks[0]='carrier_pigeon' is not there",
        "cluster.sinks has: console",
    ),
    ("weights.transport=smoke", "weights.transport='smoke' is not there", "cluster.weights has: "),
    ("rollout.num_workers=1000", "rollout.num_workers=1000: no way to place 1002 actors", "fewer"),
    (
        "reward.gpus_per_service=64",
        "reward.gpus_per_service=64 x 1: 64 GPUs asked for",
        "use fewer ranks or",
    ),
    ("run_dir=OTHER", "run_dir='OTHER' belongs to another configuration: seed is 1 there", "name another run_dir"),
    ("run_dir=EMPTY", "run_dir='EMPTY' cannot be written: EMPTY is no folder", "name another run_dir"),
]
"""(override, message, way out)"""
TRAINED = ("reward.judge.column=solution", "run_dir=OTHER")
"""`train` asks the same `preflight.check` as `check`, and imports what a run needs meanwhile, which takes ten times as long. The installed
command is refused for settings below, for prompts in test_interrupt.py, for its place in test_bad_input.py."""


@pytest.mark.parametrize(
    ("command", "override", "message", "way_out"),
    [
        *(("check", *mistake) for mistake in MISTAKES),
        *(("train", *mistake) for mistake in MISTAKES if mistake[0] in TRAINED),
    ],
)
def test_what_cannot_work_ends_with_one_message_before_anything_starts(command, override, message, way_out, run_file):
    folder = run_file.parent
    (folder / "empty.jsonl").write_text("")
    (folder / "long.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "' + "1+" * 200 + '1=", "answer": "2"}\n'
    )
    (folder / "other").mkdir()
    (folder / "other" / "run.yaml").write_text(resolved_yaml(load(run_file, ["seed=1"])))
    broadcast = {"kind": "broadcast", "time": 1.0, "policy_version": 1, "digest": "d"}
    (folder / "other" / "events.jsonl").write_text(json.dumps(broadcast) + "\n")
    places = {"EMPTY": "empty.jsonl", "LONG": "long.jsonl", "OTHER": "other", "HERE": ""}
    for place, name in places.items():
        override, message = (text.replace(place, str(folder / name)) for text in (override, message))
    result = treadwheel(command, run_file, override)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("treadwheel: ") and result.stderr.count("\n") == 1
    assert message in result.stderr and way_out in result.stderr
    assert not ray.is_initialized()
    assert not (folder / "run").exists()


def test_a_missing_run_file_says_what_to_name(tmp_path):
    result = treadwheel("train", tmp_path / "absent.yaml")
    assert result.exit_code == 2
    assert "absent.yaml cannot be read: No such file or directory; name a run file" in result.stderr


def test_a_cluster_that_does_not_answer_is_named(run_file):
    result = treadwheel("train", run_file, "--address", "127.0.0.1:1")
    assert result.exit_code == 2, result.output
    assert "address='127.0.0.1:1' does not answer; start a cluster there" in result.stderr
    assert not ray.is_initialized()


def test_debug_shows_where_an_error_came_from(run_file):
    result = treadwheel("check", run_file, "num_steps=0", "--debug")
    assert type(result.exception).__name__ == "ConfigError"


def test_info_and_verify_refuse_a_folder_without_a_run(tmp_path):
    for command in ("info", "verify"):
        result = treadwheel(command, tmp_path)
        assert result.exit_code == 2
        assert "holds no run" in result.stderr


def test_scale_refuses_what_it_cannot_do(run_file, tmp_path):
    assert "is not of the form rollout_workers=4" in treadwheel("scale", tmp_path, "workers=4").stderr
    assert "holds no run (no run.yaml)" in treadwheel("scale", tmp_path / "empty", "rollout_workers=4").stderr
    for actors, setting in (("rollout_workers", "rollout.num_workers"), ("reward_services", "reward.num_services")):
        assert f"has no living driver; set {setting}" in treadwheel("scale", run_file.parent, f"{actors}=4").stderr


def test_evaluation_names_what_is_missing(run_file, tmp_path):
    assert "has no evaluation.prompts" in treadwheel("eval", run_file).stderr
    assert (
        "is neither a run file (.yaml), nor a run directory, nor a checkpoint"
        in treadwheel("eval", tmp_path / "nothing").stderr
    )


def test_the_installed_command_ends_without_a_traceback(run_file):
    command = [str(Path(sys.executable).parent / "treadwheel"), "train", str(run_file), "num_stepz=3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, cwd=ROOT)
    assert ended.returncode == 2
    assert ended.stderr == f"treadwheel: {run_file}: num_stepz=3 is not a setting; did you mean num_steps?\n"

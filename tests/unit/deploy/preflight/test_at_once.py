import io
import os
import queue
import subprocess
import sys

import pytest

from cluster.contracts.errors import ConfigError
from deploy.preflight import at_once, check
from deploy.preflight.at_once import check_settings, check_settings_of_evaluation, check_settings_of_learning
from tests.models import make_tiny_model
from tests.unit.deploy.preflight.runs import run

WRONG_NAMES = (
    "algorithm.advantage=gpro",
    "algorithm.filters=[zero_std]",
    "algorithm.policy_loss={name: ppo_clip, clip_lo: 0.1}",
    "reward.judge=mathverify",
    "reward.judge={name: exact_match, colum: answer}",
    "weights.transport=smoke",
    "metrics.sinks=[jsonl, {name: wnadb}]",
    "prompts.taks=3",
)
"""Each one problem."""
STARTS = """
import sys
from deploy.cli import main
try:
    main()
except SystemExit as end:
    heavy = {"ray", "torch", "transformers", "reasoning_gym"} & sys.modules.keys()
    print(f"exit code {end.code}, heavy imports: {sorted(heavy)}")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def refusal(checks, config) -> str:
    with pytest.raises(ConfigError) as refused:
        checks(config)
    return str(refused.value)


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_a_wrong_name_is_told_at_once_in_the_words_of_the_whole_check(wrong, tmp_path, model):
    config = run(tmp_path, model, wrong)
    at_once = refusal(check_settings, config)
    assert "\n" not in at_once and at_once in refusal(check, config)


@pytest.mark.parametrize("checks", [check_settings, check_settings_of_learning])
def test_a_run_directory_that_takes_no_files_is_told_at_once(checks, tmp_path, model):
    """Seen before: after all imports and slow checks, a minute on a busy machine; on SLURM once Ray was up on all nodes."""
    config = run(tmp_path, model, "run_dir=/proc/run")
    assert refusal(checks, config).startswith("run_dir='/proc/run' cannot be written: /proc takes no files")


def test_settings_that_are_wrong_in_several_places_are_told_together(tmp_path):
    config = run(tmp_path, "./none", *WRONG_NAMES[:1], *WRONG_NAMES[3:4], "elastic.min_workers=2")
    assert refusal(check_settings, config).startswith("4 problems\n")


def test_what_no_name_is_wrong_in_passes_even_where_more_is_wrong(tmp_path, model):
    """That is for the whole check."""
    check_settings(run(tmp_path, model, "buffer.trajectories_per_group=1", "algorithm.advantage=nowhere:advantage"))


def test_what_a_verb_does_not_read_is_not_refused(tmp_path, model):
    check_settings_of_learning(run(tmp_path, model, "recorded=a.arrow", "reward.judge=mathverify"))
    check_settings_of_evaluation(run(tmp_path, model, "metrics.sinks=[wnadb]", "elastic.min_workers=2"))
    for checks in (check_settings_of_learning, check_settings_of_evaluation):
        assert "algorithm: advantage='gpro'" in refusal(checks, run(tmp_path, model, WRONG_NAMES[0]))


@pytest.mark.parametrize("verb", [["train"], ["eval"], ["learn", "recorded.arrow"]])
def test_a_wrong_name_ends_a_start_before_anything_heavy_is_imported(verb, tmp_path):
    command = [*verb, "deploy/runs/quickstart.yaml", f"run_dir={tmp_path / 'run'}", "algorithm.advantage=gpro"]
    done = subprocess.run([sys.executable, "-c", STARTS, *command], capture_output=True, text=True, check=True)
    assert "algorithm: advantage='gpro' is not there; did you mean 'grpo'?" in done.stderr
    assert done.stdout == "exit code 2, heavy imports: []\n"


def test_a_run_directory_that_stands_still_is_told_of(tmp_path, model, monkeypatch):
    """Seen before: on a hung NFS the command stood still without a word. Here its lock is a pipe that nobody writes until then."""
    lock, writers = tmp_path / "run" / "driver.lock", queue.SimpleQueue()

    class Told(io.StringIO):
        def flush(self) -> None:
            # The command goes on once the pipe is open, perhaps before this thread has told which descriptor it got.
            writers.put(os.open(lock, os.O_RDWR | os.O_NONBLOCK))

    lock.parent.mkdir()
    os.mkfifo(lock)
    monkeypatch.setattr(at_once, "_SILENT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", told := Told())
    at_once.begun(run(tmp_path, model), None)
    os.close(writers.get(timeout=60))
    assert told.getvalue().startswith(f"treadwheel: run_dir='{lock.parent}' has not answered for 0 s: bring its file")

"""What `train` and `check` make of their arguments, and how a callback stops a run. Runs themselves: tests/integration/test_python.py."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

import treadwheel
from cluster.contracts.errors import ConfigError
from deploy.cluster_up.stopping import Stop
from deploy.config.loading import validated
from tests.unit.treadwheel import my_functions
from treadwheel.training import _configured, _Heard, beside_a_loop

RUN = {"model": {"path": "m"}, "prompts": {"name": "file", "path": "p.jsonl", "max_prompt_tokens": 7}}


def configured(config=RUN, overrides=(), *, judge=None, environment=None, prompts=None):
    return _configured(config, overrides, judge, environment, prompts)


def test_a_run_file_a_mapping_and_a_configuration_say_the_same(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    expected = validated(dict(RUN), ["num_steps=7"])
    for given in (RUN, str(tmp_path / "run.yaml"), tmp_path / "run.yaml", validated(dict(RUN))):
        assert configured(given, ["num_steps=7"]) == expected


def test_judge_environment_and_prompts_stand_in_the_place_of_what_the_file_says():
    config = configured(
        {**RUN, "reward": {"judge": "math_verify", "timeout_s": 9}},
        judge=my_functions.judge,
        environment={"name": "guess", "top": 9},
        prompts={"name": "file", "path": "other.jsonl"},
    )
    assert config.reward.judge.name == "tests.unit.treadwheel.my_functions:judge" and config.reward.timeout_s == 9
    assert config.environment.params == {"top": 9}
    assert config.prompts.params == {"path": "other.jsonl"} and config.prompts.max_prompt_tokens == 7


def test_rows_of_prompts_are_kept_in_the_run_directory_under_a_name_of_what_is_in_them(tmp_path):
    here = [f"run_dir={tmp_path}"]
    rows = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "1 + 2 =", "answer": "3"}]
    path = configured(RUN, here, prompts=iter(rows)).prompts.params["path"]
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rows
    assert configured(RUN, here, prompts=rows).prompts.params["path"] == path
    assert configured(RUN, here, prompts=rows[:1]).prompts.params["path"] != path


def test_rows_of_prompts_make_a_run_directory_that_nobody_else_reads(tmp_path):
    configured(RUN, [f"run_dir={tmp_path}/run"], prompts=[{"prompt": "2 + 2 =", "answer": "4"}])
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_no_rows_are_no_prompts():
    with pytest.raises(ConfigError, match="prompts is empty"):
        configured(RUN, prompts=[])


def test_what_is_wrong_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="did you mean num_steps"):
        treadwheel.train({**RUN, "num_stepz": 3})


def test_a_callback_that_returns_true_stops_the_run_and_hears_no_more():
    stop, heard = Stop(), []
    sink = _Heard(lambda step, metrics: heard.append(step) or step == 2, stop)
    for step in (1, 2, 3):
        sink.step(step, {})
    assert heard == [1, 2] and stop.is_asked and sink.has_stopped and sink.error is None


def test_a_callback_that_raises_stops_the_run_and_its_error_is_kept():
    stop = Stop()
    sink = _Heard(lambda step, metrics: metrics["missing"], stop)
    sink.step(1, {})
    assert stop.is_asked and isinstance(sink.error, KeyError)


async def test_beside_a_running_loop_work_has_a_thread_of_its_own():
    assert beside_a_loop(lambda: asyncio.run(asyncio.sleep(0, threading.current_thread().name)), Stop()).startswith(
        "treadwheel"
    )


def test_without_one_it_stays_where_signals_are_heard():
    assert beside_a_loop(threading.current_thread, Stop()) is threading.main_thread()

"""What `train` and `check` make of their arguments, and how a callback stops a run. Runs themselves: tests/integration/test_python.py."""

import asyncio
import json
import signal
import sys
import threading
from datetime import date
from pathlib import Path

import numpy as np
import pytest

import treadwheel
from cluster.contracts.errors import ConfigError, InUseError
from cluster.record.run_directory import RunDirectory
from deploy.cluster_up.stopping import Stop
from deploy.config.loading import validated
from tests.unit.treadwheel import my_functions
from tests.unit.treadwheel.notebook import hearing_ctrl_c, in_a_cell, press_ctrl_c
from treadwheel.training import _CallbackSink, _configured, _stored, beside_a_loop, train

RUN = {"model": {"path": "m"}, "prompts": {"name": "file", "path": "p.jsonl", "max_prompt_tokens": 7}}


def configured(config=RUN, overrides=(), *, judge=None, environment=None, prompts=None):
    config, _ = _configured(config, overrides, judge, environment, prompts)
    return config


def kept(prompts, run_dir):
    """The configuration, and the rows as the run that passes its check has them."""
    config, rows = _configured(RUN, [f"run_dir={run_dir}"], None, None, prompts)
    with _stored(rows) as written:
        written.pop_all()
    return config


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
    rows = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "1 + 2 =", "answer": "3"}]
    path = kept(iter(rows), tmp_path).prompts.params["path"]
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rows
    assert kept(rows, tmp_path).prompts.params["path"] == path
    assert kept(rows[:1], tmp_path).prompts.params["path"] != path


def test_rows_of_prompts_make_a_run_directory_that_nobody_else_reads(tmp_path):
    kept([{"prompt": "2 + 2 ="}], tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_run_that_is_refused_leaves_no_rows_and_takes_none_of_those_that_were_there(tmp_path, monkeypatch):
    here, seen = [f"run_dir={tmp_path}/run"], []
    rows = [{"prompt": "2 + 2 ="}]

    def refused(config, **others):
        seen.append(Path(config.prompts.params["path"]).read_text())
        raise ConfigError("no")

    monkeypatch.setattr("deploy.preflight.check", refused)
    for verb in (treadwheel.train, treadwheel.check):
        with pytest.raises(ConfigError, match=r"^no$"):
            verb(RUN, here, prompts=rows)
        assert not (tmp_path / "run").exists()
    path = kept(rows, tmp_path / "run").prompts.params["path"]
    with pytest.raises(ConfigError, match=r"^no$"):
        treadwheel.train(RUN, here, prompts=rows)
    assert seen == ['{"prompt": "2 + 2 ="}\n'] * 3 and Path(path).exists()


def test_rows_are_not_written_beside_a_run_that_another_driver_has(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"))
    directory.claim("{}")
    try:
        with pytest.raises(InUseError):
            kept([{"prompt": "2 + 2 ="}], tmp_path / "run")
        assert not list((tmp_path / "run").glob("prompts-*"))
    finally:
        directory.release()


def test_paths_and_numbers_of_numpy_are_what_a_run_file_has_for_them(tmp_path):
    model = {"path": tmp_path / "m"}
    assert configured({**RUN, "model": model, "num_steps": np.int64(7)}).model.path == str(tmp_path / "m")
    rows = [{"prompt": "2 + 2 =", "answer": np.int64(4), "weights": np.array([0.5, 1.0])}]
    path = kept(rows, tmp_path / "run").prompts.params["path"]
    assert json.loads(Path(path).read_text()) == {"prompt": "2 + 2 =", "answer": 4, "weights": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompts": ["abc"]}, "prompts: row 0 is 'abc'; each is a mapping of columns"),
        ({"prompts": 5}, "prompts=5 is no source; give its name, a function, or rows"),
        (
            {"prompts": [{"prompt": "a"}, {"prompt": "b", "day": date(2026, 1, 2)}]},
            r"prompts: row 1, column 'day': .* is a date; give",
        ),
        ({"overrides": "num_steps=3"}, r"overrides is a str; give a list, such as \['num_steps=50'\]"),
        ({"overrides": {"num_steps": 3}}, "overrides is a dict; give a list"),
        ({"overrides": None}, r"overrides is a NoneType; give a list, such as \['num_steps=50'\]"),
        (
            {"overrides": ["num_steps=3", ("seed", 3)]},
            r"overrides\[1\]=\('seed', 3\) is no text; write it as 'num_steps=50'",
        ),
        ({"config": None}, "config=None is no run; give a run file, a mapping like one, or a RunConfig"),
        ({"config": {**RUN, "num_steps": {1, 2}}}, "the configuration: {1, 2} is a set; give a text"),
    ],
)
def test_what_no_run_file_could_say_is_refused_by_its_name(given, why):
    with pytest.raises(ConfigError, match=why):
        configured(**given)


@pytest.mark.parametrize(
    ("callbacks", "why"),
    [
        (print, "callbacks=<built-in function print> is no list; give one of functions"),
        ([print, 5], r"callbacks\[1\]=5 is no function; it is called as callback\(step, metrics\)"),
        ([asyncio.sleep], r"callbacks\[0\]=<function sleep at .*> is asynchronous; .* write it with def"),
    ],
)
def test_callbacks_that_cannot_be_called_are_refused_before_anything_starts(callbacks, why):
    with pytest.raises(ConfigError, match=why):
        train(RUN, callbacks=callbacks)


def test_overrides_from_a_generator_apply_to_a_run_with_rows_too():
    config, _ = _configured(RUN, (each for each in ["num_steps=7"]), None, None, [{"prompt": "2 + 2 ="}])
    assert config.num_steps == 7


def test_no_rows_are_no_prompts():
    with pytest.raises(ConfigError, match="prompts is empty"):
        configured(RUN, prompts=[])


def test_what_is_wrong_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="did you mean num_steps"):
        treadwheel.train({**RUN, "num_stepz": 3})


def test_a_callback_that_returns_true_stops_the_run_and_hears_no_more():
    stop, heard = Stop(), []
    sink = _CallbackSink(lambda step, metrics: heard.append(step) or step == 2, stop)
    for step in (1, 2, 3):
        sink.step(step, {})
    assert heard == [1, 2] and stop.is_asked and sink.has_stopped and sink.error is None


def test_a_callback_that_raises_stops_the_run_and_its_error_is_kept():
    stop = Stop()
    sink = _CallbackSink(lambda step, metrics: metrics["missing"], stop)
    sink.step(1, {})
    assert stop.is_asked and isinstance(sink.error, KeyError)


def test_a_callback_whose_answer_is_no_answer_is_an_error_and_no_silent_stop():
    """Seen in review: `lambda step, metrics: log.write(...)` ended a run after its first step without a word."""
    stop = Stop()
    sink = _CallbackSink(lambda step, metrics: 37, stop)
    sink.step(1, {})
    assert isinstance(sink.error, ConfigError) and "returned 37; return True to stop" in str(sink.error)
    assert stop.is_asked


def test_numpys_truth_values_are_answers():
    stop = Stop()
    sink = _CallbackSink(lambda step, metrics: np.float32(step) > 1, stop)
    sink.step(1, {})
    assert not stop.is_asked
    sink.step(2, {})
    assert stop.is_asked and sink.error is None


def test_a_callback_that_exits_stops_the_run_as_an_error_does():
    stop = Stop()
    sink = _CallbackSink(lambda step, metrics: sys.exit("enough"), stop)
    sink.step(1, {})
    assert stop.is_asked and isinstance(sink.error, SystemExit)


async def test_beside_a_running_loop_work_has_a_thread_of_its_own():
    assert beside_a_loop(lambda: asyncio.run(asyncio.sleep(0, threading.current_thread().name)), Stop()).startswith(
        "treadwheel"
    )


def test_interrupting_the_kernel_ends_a_check(monkeypatch):
    """Seen in review: no press ended it, and only its result did."""
    may_end, has_ended = threading.Event(), threading.Event()

    def slow(config, **others):
        threading.Timer(0.2, press_ctrl_c).start()
        may_end.wait(60)
        has_ended.set()

    monkeypatch.setattr("deploy.preflight.check", slow)
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: treadwheel.check(RUN))
    assert not has_ended.is_set()
    may_end.set()


def test_below_asyncio_run_the_first_ctrl_c_stops_the_work():
    """Seen in review: asyncio's handler took the first press, and only a second one saved."""
    stop, is_pressed = Stop(), threading.Event()

    def work() -> bool:
        with stop.reaching(ask=is_pressed.set, press=is_pressed.set):
            threading.Timer(0.2, press_ctrl_c).start()
            return is_pressed.wait(60)

    async def program() -> bool:
        before = signal.getsignal(signal.SIGINT)
        is_saved = beside_a_loop(work, stop)
        assert signal.getsignal(signal.SIGINT) is before
        return is_saved

    with hearing_ctrl_c():
        assert asyncio.run(program())


def test_without_one_it_stays_where_signals_are_heard():
    assert beside_a_loop(threading.current_thread, Stop()) is threading.main_thread()


def test_an_error_outside_a_notebook_comes_alone():
    def refused() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError) as error:
        beside_a_loop(refused, Stop())
    assert error.value.__context__ is None, "a traceback shows one error"

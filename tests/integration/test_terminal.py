"""`treadwheel train` in a real terminal: a live table that harms nothing else in it."""

import re
import sys
from pathlib import Path

import pytest

from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import read_steps
from tests.integration.commands import QUICKSTART, SMALL, run
from tests.integration.terminals import Terminal

pytestmark = pytest.mark.timeout(1800)
_SECRETS = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"), "seeded-secret-0123456789")
TREADWHEEL = str(Path(sys.executable).parent / "treadwheel")
_PRINTING = """
import logging, os, signal, subprocess, sys, time
early = logging.StreamHandler()  # holds the standard error of before, as the loggers of libraries do
from cluster.record.run_directory import RunDirectory
from cluster.sinks.console import console
sink = console(directory=RunDirectory(sys.argv[1]), num_steps=10)
print("printed by Python")
logging.getLogger("library").addHandler(early)
logging.getLogger("library").warning("warned by a library")
subprocess.run(["echo", "written by a child"], check=True)
os.write(2, b"half a line")
for version in (1, 2, 3):
    sink.step(version, {"reward/mean": version / 4, "time/step_s": 1.0})
    time.sleep(0.6 if os.isatty(0) and version < 3 else 0)  # a frame at least
sink.event({"kind": "failure", "time": time.time(), "actor": "rollout-0", "reason": "rollout-0 died", "decision": "restart"})
if sys.argv[2] == "killed":
    signal.pause()
if sys.argv[2] == "raised":
    try:
        raise SystemExit("an error of the end")
    finally:
        sink.close()
sink.close()
print("printed after it")
"""


_WAITING = """
import os, subprocess, sys, time
from cluster.sinks.console.waiting import waiting
with waiting("checks the run"):
    print("printed meanwhile", flush=True)
    subprocess.run(["echo", "written by a child"], check=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
print("and goes on")
"""


_SLOWLY = """
import time
from rich.panel import Panel
from cluster.sinks.console.terminal import live
class Slow:
    def __rich_console__(self, console, options):
        time.sleep(0.5)  # some frames
        yield "printed slowly"
with live(lambda: Panel("a table"), per_second=20) as console:
    console.print(Slow())
"""


@pytest.mark.parametrize(("columns", "end"), [(60, "closed"), (100, "raised")])
def test_what_others_print_scrolls_by_above_the_table_and_the_last_numbers_stay(tmp_path, columns, end):
    with Terminal(sys.executable, "-c", _PRINTING, str(tmp_path), end, columns=columns, lines=40) as terminal:
        assert terminal.exit_code() == (1 if end == "raised" else 0)
        lines = terminal.everything.splitlines()
    told = ("printed by Python", "warned by a library", "written by a child", "half a line")
    assert [line for line in lines if line in told] == list(told), "each once, whole and in order"
    top = next(i for i, line in enumerate(lines) if line.startswith("╭"))
    assert lines.index("written by a child") < lines.index("failure: rollout-0 died; it starts again") < top
    assert sum(line.startswith("╭") for line in lines) == 1, "drawn in place"
    assert "step 3 of 10" in lines[top + 1] and any("0.750" in line for line in lines[top:])
    assert lines[-1] == ("an error of the end" if end == "raised" else "printed after it")


def test_a_frame_that_is_due_while_a_line_is_printed_waits_for_it():
    with Terminal(sys.executable, "-c", _SLOWLY) as terminal:
        assert terminal.exit_code() == 0
        lines = terminal.everything.splitlines()
    assert lines[0] == "printed slowly" and sum(line.startswith("╭") for line in lines) == 1


def test_a_wait_is_seen_keeps_what_is_printed_and_leaves_nothing(tmp_path):
    with Terminal(sys.executable, "-c", _WAITING, str(tmp_path / "done")) as terminal:
        screen = terminal.wait_for(
            lambda screen: re.search(r"checks the run  \d+:\d\d", screen) and "by a child" in screen
        )
        assert screen.splitlines()[:2] == ["printed meanwhile", "written by a child"]
        (tmp_path / "done").touch()
        assert terminal.exit_code() == 0
        assert "checks the run" not in terminal.everything and terminal.everything.endswith("and goes on")
    piped = run(sys.executable, "-c", _WAITING, str(tmp_path / "done"))
    assert piped.stdout == "printed meanwhile\nwritten by a child\nand goes on\n"


def test_a_process_that_is_killed_leaves_a_terminal_that_works_and_the_last_numbers(tmp_path):
    with Terminal(sys.executable, "-c", _PRINTING, str(tmp_path), "killed") as terminal:
        terminal.wait_for(lambda screen: "step 3 of 10" in screen)
        terminal.kill()
        assert terminal.exit_code() == -9
        assert "step 3 of 10" in terminal.screen and not terminal.is_cursor_hidden
        assert terminal.modes == terminal.modes_before


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_dumb_terminals_get_lines_and_no_color_means_none(tmp_path, env):
    with Terminal(sys.executable, "-c", _PRINTING, str(tmp_path), "closed", env=env) as terminal:
        terminal.exit_code()
        colours = re.findall(rb"\x1b\[[0-9;]*3[0-7]m", terminal.raw)
        assert not colours
        assert ("step 3/10  reward 0.750" in terminal.everything) == ("TERM" in env)


def test_a_run_in_a_terminal_is_a_table_until_ctrl_c_and_another_process_can_watch_it(tmp_path):
    run_dir, judge = tmp_path / "run", "reward.judge=tests.integration.judges:printing"
    train = ("train", QUICKSTART, f"run_dir={run_dir}", *SMALL, judge, "num_steps=2000")
    with Terminal(TREADWHEEL, *train, env=_SECRETS) as terminal:
        terminal.wait_for(lambda screen: re.search(r"step ([3-9]|\d\d+) of 2000", screen))
        # Later stages may have been on the screen for too short a time: Ray is often up when the checks are over.
        assert b"checks settings, model, prompts, judge and machine" in terminal.raw
        with Terminal(TREADWHEEL, "info", str(run_dir), "--watch", columns=60, lines=34) as watching:
            watching.wait_for(lambda screen: "1 of 1 serve" in screen and "left" in screen)
            told = ("left", "reward", "KL", "entropy", "sampling", "staleness  0 of at most 0 steps", "1 of 1 serve")
            terminal.wait_for(lambda screen: all(each in screen for each in told))
            terminal.wait_for(lambda _: "reward: judges '" in terminal.everything)
            terminal.press_ctrl_c()
            assert terminal.exit_code() == 130
            assert watching.exit_code() == 0
            assert "stopped" in watching.screen
        lines = terminal.everything.splitlines()
        assert "treadwheel: stopping; a second Ctrl-C skips what takes long" in lines
        secret = _SECRETS["WANDB_API_KEY"].encode()
        files = [file for file in run_dir.rglob("*") if file.is_file()]
        assert files and secret not in terminal.raw
        assert [file for file in files if secret in file.read_bytes()] == []
        last = max(read_steps(RunDirectory(str(run_dir))))
        assert f"step {last} of 2000" in terminal.screen
        # The step that was under way may be recorded already, and not learned: it is learned again.
        assert any(line.startswith(("treadwheel: stopped; step ", "treadwheel: stopped; the last ")) for line in lines)
        # At Ctrl-C a terminal drops what it has not shown yet, which may be half of a frame: then the frame before it stays.
        assert 1 <= sum(line.startswith("╭") for line in lines) <= 2
        assert not terminal.is_cursor_hidden and terminal.modes == terminal.modes_before


def test_through_a_pipe_there_are_lines(tmp_path):
    piped = run(sys.executable, "-c", _PRINTING, str(tmp_path), "closed")
    assert "step 3/10  reward 0.750" in piped.stdout and "\x1b" not in piped.stdout and "╭" not in piped.stdout

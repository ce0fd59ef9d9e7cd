"""`treadwheel play`: real environments in real processes, with a script for the person."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner, Result

from cluster.contracts.episodes import ToolCall
from cluster.contracts.hiding import hidden
from cluster.record.run_directory import RunDirectory
from deploy.cli import app
from deploy.config.yaml_text import dumped
from deploy.playing import call_of
from tests.object_store import s3
from tests.unit.actors.chat.families import tokenizer_of

pytestmark = pytest.mark.slow  # nearly all of it: each environment is a process

HERE = "tests.unit.actors.environments.environments"
GUESS = (f"{HERE}:guess", "--prompt", "Guess.")
TOOLS = [{"function": {"name": "add"}}]


def played(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["play", *words], input=stdin)


def said(*answers: str) -> list[str]:
    return [word for answer in answers for word in ("--say", answer)]


def test_a_script_plays_to_the_end_and_everything_is_shown_in_order():
    result = played(*GUESS, "top=20", "--seed", "0", *said("10", "no idea", "13", "14"))
    assert result.exit_code == 0 and result.output.splitlines() == [
        "user  Guess.",
        "assistant  10",
        "user  higher",
        "assistant  no idea",
        "user  ?",
        "assistant  13",
        "ended: reward 0.8",
    ]


def test_what_comes_from_stdin_is_said_and_its_end_leaves_the_game():
    result = played(*GUESS, stdin="1\n")
    assert result.exit_code == 0 and result.output.splitlines()[1:3] == ["assistant  1", "user  higher"]
    assert result.output.splitlines()[-1] == "  stopped: the environment asks for another turn, and there is none"


def test_what_a_prompt_or_a_model_says_does_nothing_to_the_terminal(model):
    """Seen in review: a web page in a tool's answer could write into the clipboard of the person who plays."""
    words = (f"{HERE}:guess", "top=20", "--prompt", "Gu\x1b]52;c;cHduZWQ=\x07ess.\x1b[2J")
    result = played(*words, "--model", model, *said("1\x1b]0;owned\x070", "13"))
    assert result.output.splitlines()[:3] == ["user  Guess.", "assistant  10", "user  higher"]
    assert "\x1b" not in result.output and "\x07" not in result.output


def test_rewards_notes_and_rewritten_contexts_are_told():
    result = played(f"{HERE}:with_all_events", "--prompt", "Hi.", *said("a", "b", "c"))
    assert result.output.splitlines()[2:] == [
        "  earned 0.5 (first)",
        "  logged note: remember 7",
        "  the context is rewritten; from here on it is:",
        "user  Hi.",
        "user  The note says 7.",
        "assistant  b",
        "  earned 0.25",
        "user  And?",
        "assistant  c",
        "  logged last: 1.0",
        "ended: 0.75 earned, and judges score the rest",
    ]


def test_a_raw_prompt_of_an_agent_is_shown():
    agent = "tests.unit.actors.environments.agents:agent"
    result = played(agent, "--columns", "{do: say, requests: [{prompt: 'Go:'}]}", *said("a"))
    assert result.output.splitlines()[:2] == ["  a raw prompt: Go:", "assistant  a"]
    assert '"text":"a"' in result.output


def test_a_tool_of_an_agent_needs_only_a_name():
    """Seen before: a KeyError. OpenAI's API asks neither for a description nor for parameters."""
    tools = "[{type: function, function: {name: stop}}]"
    request = f"{{messages: [{{role: user, content: Go.}}], tools: {tools}}}"
    agent = "tests.unit.actors.environments.agents:agent"
    result = played(agent, "--columns", f"{{do: say, requests: [{request}]}}", *said("a"))
    assert result.exit_code == 0 and "  tool stop()" in result.output.splitlines()


def test_tools_are_called_by_a_slash_and_mistakes_are_answered_as_a_models_are():
    columns = ("--columns", "{answer: 144}")
    calls = said("/calculate expression=12*12", '/calculate {"expresion": ', "/sum x=1", "144")
    result = played(f"{HERE}:with_calculator", *columns, *calls)
    told = result.output.splitlines()
    assert "  tool calculate(expression): Value of an arithmetic expression." in told
    assert [line for line in told if line.startswith("tool ")] == [
        "tool calculate  144",
        "tool calculate  error: the arguments of calculate must be a JSON object, not '{\"expresion\":'",
        "tool sum  error: there is no tool 'sum'; there are: calculate",
    ]
    assert told[-1] == "ended: reward 1; 3 tool calls, 2 malformed"


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("/add a=1 b='two words'", ToolCall(name="add", arguments={"a": 1, "b": "two words"})),
        ('/add {"a": [1]}', ToolCall(name="add", arguments={"a": [1]})),
        ("/add", ToolCall(name="add", arguments={})),
        ("/add 5", ToolCall(name="add", arguments="5")),
        ("/add 'a=1", ToolCall(name="add", arguments="'a=1")),
        ("1/2", None),
    ],
)
def test_a_call_is_written_in_one_line(line, call):
    assert call_of(line, TOOLS) == call
    assert call_of(line, ()) is None


def test_a_limit_and_a_failure_are_told_apart():
    endless = played(f"{HERE}:obedient", "--columns", "{do: 'earn, then ask for ever'}", *said(*"x" * 16))
    assert endless.exit_code == 0
    assert endless.output.splitlines()[-1] == "ended at the limit max_turns: reward 0.25, which was earned before"
    failed = played(f"{HERE}:obedient", "--columns", "{do: raise}", *said("x"))
    assert failed.exit_code == 1
    assert failed.output.splitlines()[-1] == "failed, no reward: environment: ValueError: no opinion"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "environment='nowhere' is not there"),
        ([f"{HERE}:guess", "bottom=1"], "environment.bottom=1 is not a parameter"),
        ([f"{HERE}:guess", "--columns", "answer"], "--columns='answer' must be a mapping"),
        (["deploy/runs/quickstart.yaml", "--prompt", "x"], "leave --prompt, --columns, --env out"),
        (["deploy/runs/quickstart.yaml", "seed=5"], "seed=5 has no effect on a game: --seed names that of the task"),
        (["deploy/runs/quickstart.yaml", "episodes.timeout_s=5"], "episodes.timeout_s=5 has no effect on a game"),
    ],
)
def test_what_cannot_be_played_is_refused_before_it_begins(words, why):
    result = played(*words)
    assert result.exit_code == 2 and why in result.output


def test_a_run_file_is_played_with_its_first_prompt():
    result = played("deploy/runs/quickstart.yaml", f"environment={{name: '{HERE}:guess', top: 1}}", *said("1"))
    assert result.exit_code == 0, result.output
    first, *_, last = result.output.splitlines()
    assert first.startswith("user  ") and last == "ended: reward 1"


def test_an_agent_may_send_its_runs_temperature():
    settings = ("environment=tests.unit.deploy.preflight.worlds:warm", "sampling.temperature=0.7")
    result = played("deploy/runs/quickstart.yaml", *settings, *said("1"))
    assert result.exit_code == 0, result.output


def test_a_run_files_own_column_of_sources_is_read_as_its_run_reads_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Guess.", "source": "a book"}\n')
    sources = {"games": {"name": "file", "path": str(tmp_path / "rows.jsonl")}}
    run = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "none"},
        "prompts": {"sources": sources},
        "reward": {"source_column": "origin"},
        "environment": {"name": f"{HERE}:guess", "top": 1},
    }
    (tmp_path / "run.yaml").write_text(dumped(run))
    result = played(str(tmp_path / "run.yaml"), *said("1"))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_run_is_played_wherever_its_directory_is(tmp_path, place):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Guess."}\n')
    run = {
        "model": {"path": "none"},
        "prompts": {"name": "file", "path": str(tmp_path / "rows.jsonl")},
        "environment": {"name": f"{HERE}:guess", "top": 1},
    }
    with s3("played"):
        directory = RunDirectory("s3://played/run" if place == "store" else str(tmp_path))
        directory.write_file("run.yaml", dumped({"run_dir": directory.url, **run}).encode())
        result = played(directory.url, *said("1"))
    assert result.exit_code == 0 and result.output.splitlines()[-1] == "ended: reward 1", result.output


def test_a_game_needs_the_settings_again_that_the_run_hid(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Guess."}\n')
    run = {
        "run_dir": str(tmp_path),
        "model": {"path": "none"},
        "prompts": {"name": "file", "path": str(tmp_path / "rows.jsonl")},
        "environment": {"name": f"{HERE}:guess", "top": "http://me:secret@host"},
    }
    (tmp_path / "run.yaml").write_text(dumped(hidden(run)))
    refused = played(str(tmp_path), *said("1"))
    assert refused.exit_code == 2 and "run.yaml: the value of environment.top is hidden there" in refused.output
    assert played(str(tmp_path), "environment.top=1", *said("1")).exit_code == 0


def model_of(family: str, folder: Path) -> str:
    tokenizer_of(family).save_pretrained(folder)
    Qwen3Config(max_position_embeddings=4096).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(tmp_path):
    return model_of("qwen25", tmp_path)


def test_a_model_shows_which_tokens_would_be_trained(model):
    result = played(*GUESS, "--model", model, *said("10", "13"))
    _, _, rows = result.output.partition("ended: reward 0.9\n")
    assert rows.startswith("row 1: ") and " tokens are trained\n" in rows
    assert "<|im_start|>assistant\n⟦10<|im_end|>⟧\n<|im_start|>user\nhigher<|im_end|>" in rows
    assert rows.rstrip().endswith("<|im_start|>assistant\n⟦13<|im_end|>⟧")


def test_with_a_model_a_call_is_read_from_the_tokens_that_its_template_makes_of_it(model):
    columns = ("--columns", "{answer: 2}", "--prompt", "1+1?")
    result = played(f"{HERE}:with_calculator", *columns, "--model", model, *said("/calculate expression=1+1", "2"))
    assert "tool calculate  2" in result.output and "ended: reward 1; 1 tool calls, 0 malformed" in result.output
    assert (
        '⟦<tool_call>\n{"name": "calculate", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>⟧'
        in result.output
    )


def test_a_line_is_an_answer_where_the_template_opens_the_reasoning(tmp_path):
    """Each line was a thought: the environment heard nothing, and no call was made."""
    columns = ("--columns", "{answer: 2}", "--prompt", "1+1?")
    lines = said("/calculate expression=1+1", "Two?</think>2")
    result = played(f"{HERE}:with_calculator", *columns, "--model", model_of("qwen35", tmp_path), *lines)
    assert "tool calculate  2" in result.output and "ended: reward 1; 1 tool calls, 0 malformed" in result.output
    assert "<think>\n⟦\n</think>\n\n<tool_call>" in result.output and "<think>\n⟦Two?</think>2" in result.output


def test_a_rewritten_context_is_a_row_of_its_own(model):
    result = played(f"{HERE}:with_all_events", "--prompt", "Hi.", "--model", model, *said("a", "", "c"))
    assert (
        "row 2: " in result.output
        and "The note says 7.<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧" in result.output
    )


def test_the_tokens_of_a_run_file_are_those_of_its_episodes(tmp_path):
    """Seen in review: a run whose history is the template's has a row for each turn that reasons, and play showed one."""
    settings = (f"environment={{name: '{HERE}:guess', top: 20}}", "episodes.history=template")
    words = said("<think>\nhalf\n</think>\n\n10", "13")
    result = played("deploy/runs/quickstart.yaml", *settings, "--model", model_of("qwen3", tmp_path), *words)
    assert result.exit_code == 0, result.output
    assert "row 1: " in result.output and "row 2: " in result.output


def test_ctrl_c_at_the_keyboard_ends_the_game(tmp_path):
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "deploy.cli", "play", *GUESS]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as game:
        os.close(terminal)
        try:
            seen = b""
            while b"assistant> " not in seen:
                seen += os.read(keyboard, 1024)
            os.write(keyboard, b"1\n")
            while b"assistant> " not in seen.partition(b"higher")[2]:
                seen += os.read(keyboard, 1024)
            # Python loses a signal that comes between its last look for one and its wait for a key.
            while game.poll() is None and psutil.Process(game.pid).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
            game.send_signal(signal.SIGINT)
            assert game.wait(timeout=240) == 130
        finally:
            game.kill()
    os.close(keyboard)

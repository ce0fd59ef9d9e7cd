"""What the command line does before anything heavy is imported."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cluster.contracts.errors import ConfigError, LostError, PreemptedError
from cluster.record.run_directory import EVENTS, RunDirectory
from deploy import evaluation, launch, preflight
from deploy.cli import app, running
from deploy.cluster_up.ahead import RayAhead
from deploy.config.loading import load, resolved_yaml
from deploy.reports import run_info
from deploy.reports import verify as verification
from deploy.reports.run_info import print_summary
from deploy.reports.summary import summarize

QUICKSTART = "deploy/runs/quickstart.yaml"
_COMMAND = """
import sys
from deploy.cli import app
try:
    app(sys.argv[1:])
finally:
    print([name for name in ("torch", "transformers", "ray", "vllm") if name in sys.modules])
"""


def test_a_second_run_on_a_busy_directory_is_refused_before_anything_heavy_is_imported(tmp_path):
    override = f"run_dir={tmp_path / 'run'}"
    directory = RunDirectory(str(tmp_path / "run"))
    directory.claim(resolved_yaml(load(QUICKSTART, [override])))
    command = [sys.executable, "-c", _COMMAND, "train", QUICKSTART, override]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    directory.release()
    assert refused.returncode == 2 and "is in use by process" in refused.stderr, refused.stderr
    assert refused.stdout == "[]\n"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize(("setting", "code"), [("num_steps=3", 0), ("reward.judge=exact_mach", 2)])
def test_settings_alone_are_checked_before_anything_heavy_is_imported(setting, code, is_busy, tmp_path):
    """A busy directory is waited for by the run itself."""
    override = f"run_dir={tmp_path / 'run'}"
    directory = RunDirectory(str(tmp_path / "run"))
    if is_busy:
        directory.claim(resolved_yaml(load(QUICKSTART, [override])))
    command = [sys.executable, "-c", _COMMAND, "train", QUICKSTART, override, setting, "--only-settings"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    directory.release()
    assert checked.returncode == (0 if is_busy else code) and checked.stdout == "[]\n"


_MAIN = [sys.executable, "-c", "from deploy.cli import main; main()"]


def test_a_working_folder_that_was_removed_is_told_of(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = ["bash", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *_MAIN, "list"]
    refused = subprocess.run(program, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == (
        "treadwheel: the current folder cannot be used: No such file or directory; change to another\n"
    )


def test_output_that_finds_no_room_ends_a_command_with_one_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*_MAIN, "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert (
        ended.stderr
        == "treadwheel: [Errno 28] No space left on device; free space, then start the same command again\n"
    )


def test_a_name_that_is_not_utf_8_is_shown_all_the_same():
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([*_MAIN, "runs", b"caf\xe9"], capture_output=True, env=env, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"no runs below caf\\udce9\n", b"")


def test_an_order_to_a_living_run_imports_nothing_heavy(tmp_path):
    run = tmp_path / "run"
    directory = RunDirectory(str(run))
    directory.claim(resolved_yaml(load(QUICKSTART, [f"run_dir={run}"])))
    command = [sys.executable, "-c", _COMMAND, "scale", str(run), "reward_services=2"]
    ordered = subprocess.run(command, capture_output=True, text=True, check=True)
    directory.release()
    assert ordered.stdout.startswith("asked for 2 reward services") and ordered.stdout.endswith("\n[]\n")


@pytest.fixture
def in_the_foreground():
    """A session of tests in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_foreground")
def test_a_ctrl_c_that_some_library_swallows_during_the_checks_stops_the_command_before_the_run(tmp_path, monkeypatch):
    def check(config, *, address, looks_good, ask):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(launch, "train", lambda *_, **__: pytest.fail("the run began"))
    stopped = CliRunner().invoke(app, ["train", QUICKSTART, f"run_dir={tmp_path}"])
    assert stopped.exit_code == 130 and "treadwheel: interrupted" in stopped.output
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_INTERRUPTED_IMPORT = """
import signal, sys
class Importing:
    def find_spec(name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Importing)
from deploy.cli import main
"""


def test_a_ctrl_c_while_the_command_loads_is_no_traceback():
    stopped = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "treadwheel: interrupted\n")


def test_why_a_run_is_refused_is_said_before_its_ray_is_ended(tmp_path, monkeypatch):
    class Ahead(RayAhead):
        def start(self):
            self._at_the_end.callback(lambda: print("Ray has ended", file=sys.stderr))

    def check(config, *, address, looks_good, ask):
        looks_good()
        raise ConfigError("the judge does not import")

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(running, "RayAhead", Ahead)
    refused = CliRunner().invoke(app, ["train", QUICKSTART, f"run_dir={tmp_path}"])
    assert refused.stderr == "treadwheel: the judge does not import\nRay has ended\n"


@pytest.mark.parametrize(("error", "code"), [(PreemptedError, 75), (ConfigError, 2), (LostError, 1)])
def test_the_exit_code_says_whether_the_same_command_may_go_on(error, code, tmp_path, monkeypatch):
    def train(config, *, address, ahead):
        raise error("its node goes away")

    monkeypatch.setattr(preflight, "check", lambda config, **_: None)
    monkeypatch.setattr(launch, "train", train)
    ended = CliRunner().invoke(app, ["train", QUICKSTART, f"run_dir={tmp_path}"])
    assert ended.exit_code == code and "treadwheel: its node goes away" in ended.output


def test_the_option_of_a_wait_is_the_setting_in_seconds(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(preflight, "check", lambda config, **_: seen.append(config.elastic.wait_for_nodes_s))
    monkeypatch.setattr(launch, "train", lambda *_, **__: None)
    monkeypatch.setattr("deploy.cli.running.show", lambda *_: None)
    command = ["train", QUICKSTART, f"run_dir={tmp_path}", "--wait-for-nodes"]
    assert CliRunner().invoke(app, [*command, "30m"]).exit_code == 0 and seen == [1800.0]
    refused = CliRunner().invoke(app, [*command, "soon"])
    assert refused.exit_code == 2 and "--wait-for-nodes='soon' is not a time; write it as" in refused.output
    refused = CliRunner().invoke(app, [*command, "0m"])
    assert refused.exit_code == 2 and "elastic.wait_for_nodes_s" in refused.output and len(seen) == 1


def test_words_in_brackets_are_printed_as_they_stand(tmp_path, capsys):
    place, reason = tmp_path / "[/run]", "[rank0] no [/answer] :smile:"
    directory = RunDirectory(str(place))
    directory.write_file("run.yaml", resolved_yaml(load(QUICKSTART)).encode())
    directory.append_json(EVENTS, {"kind": "failed", "time": 0.0, "reason": reason})
    told = CliRunner().invoke(app, ["info", str(place)], env={"COLUMNS": "300"})
    assert told.exit_code == 0 and f"the run failed: {reason}" in told.output
    evaluation.print_scores(str(place), {"accuracy": 0.5})
    print_summary(directory, summarize(directory))
    assert f"{place}: accuracy 0.5\n" in (said := capsys.readouterr().out) and f"everything is in {place}\n" in said


@pytest.mark.parametrize(
    ("command", "secret"),
    [
        (["kubernetes", QUICKSTART, "model.hf_token=hunter2"], "hunter2"),
        (["kubernetes", QUICKSTART, "reward.token=hunter2"], "hunter2"),
        (["kubernetes", QUICKSTART, "model.credentials={user: hunter2}"], "hunter2"),
        (["kubernetes", QUICKSTART, "reward.judge.api_key={hunter2"], "hunter2"),
        (["kubernetes", QUICKSTART, "hf_abcdefghijklmnopqrstuvwxyz0123"], "hf_abcdefghijklmnopqrstuvwxyz0123"),
        (["serve-reward", "exact_match", "hub=hf_abcdefghijklmnopqrstuvwxyz0123"], "hf_abcdefghijklmnopqrstuvwxyz0123"),
    ],
)
def test_an_error_shows_no_secret(command, secret):
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "<hidden>" in refused.output and secret not in refused.output


def test_programs_that_may_run_longer_than_their_reward_are_not_served():
    refused = CliRunner().invoke(app, ["serve-reward", "code_stdin", "--timeout-s", "10"])
    assert refused.exit_code == 2 and "sandbox.total_s=20 must be less than the judge's timeout_s=10" in refused.output


def test_what_a_model_wrote_into_an_error_does_nothing_to_the_terminal(tmp_path, monkeypatch):
    def fail(*_):
        raise ConfigError("a judge said \x1b[2J\x1b]0;owned\x07[/INST]\ud83d, twice\n  and more")

    monkeypatch.setattr(run_info, "table", fail)
    ended = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert ended.exit_code == 2 and ended.stderr == "treadwheel: a judge said [/INST]?, twice\n  and more\n"


def test_what_anothers_record_says_does_nothing_to_the_terminal(tmp_path, monkeypatch):
    verdict = verification.Verdict(num_checkpoints=0, problems=("group a\x1b]52;c;cHduZWQ=\x07b",))
    monkeypatch.setattr(run_info, "config_of", lambda _: None)
    monkeypatch.setattr(verification, "verify", lambda *_: verdict)
    assert "group ab\n" in CliRunner().invoke(app, ["verify", str(tmp_path)]).output


def test_all_that_is_to_be_evaluated_is_checked_before_the_first_of_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "check_evaluation", lambda config, **_: None)
    monkeypatch.setattr(launch, "evaluate", lambda *_, **__: pytest.fail("an evaluation began"))
    refused = CliRunner().invoke(app, ["eval", QUICKSTART, str(tmp_path / "typo")])
    assert refused.exit_code == 2 and "typo' is neither a run file" in refused.output


def test_a_path_with_an_equals_sign_is_evaluated_and_not_taken_for_an_override(tmp_path, monkeypatch):
    """Each is opened once: what is evaluated is what was checked, though a run that goes on saves another checkpoint meanwhile."""
    asked = []

    def configured(*target):
        asked.append(target)
        return contextlib.nullcontext()

    monkeypatch.setattr(evaluation, "configured", configured)
    monkeypatch.setattr(evaluation, "check", lambda *_, **__: None)
    monkeypatch.setattr(evaluation, "warnings", lambda named: [f"warning: {' and '.join(named)} differ"])
    monkeypatch.setattr(launch, "evaluate", lambda *_, **__: {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-4").mkdir()
    override = "evaluation.prompts={name: file, path: a/b}"
    done = CliRunner().invoke(app, ["eval", "runs/lr=1e-4", "lr=1e-4", override])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines().count("warning: runs/lr=1e-4 and lr=1e-4 differ") == 1
    assert asked == [("runs/lr=1e-4", [override]), ("lr=1e-4", [override])]
    assert CliRunner().invoke(app, ["eval", override]).exit_code == 2

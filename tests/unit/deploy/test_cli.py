"""What the command line does before anything heavy is imported."""

import contextlib
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cluster.record.run_directory import RunDirectory
from deploy import launch, preflight
from deploy.cli import app
from deploy.config.loading import load, resolved_yaml

QUICKSTART = "deploy/runs/quickstart.yaml"
_TRAIN = """
import sys
from deploy.cli import app
try:
    app(["train", *sys.argv[1:]])
finally:
    print([name for name in ("torch", "transformers", "ray", "vllm") if name in sys.modules])
"""


def test_a_second_run_on_a_busy_directory_is_refused_before_anything_heavy_is_imported(tmp_path):
    override = f"run_dir={tmp_path / 'run'}"
    directory = RunDirectory(str(tmp_path / "run"))
    directory.claim(resolved_yaml(load(QUICKSTART, [override])))
    command = [sys.executable, "-c", _TRAIN, QUICKSTART, override]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    directory.release()
    assert refused.returncode == 2 and "is in use by process" in refused.stderr, refused.stderr
    assert refused.stdout == "[]\n"


def test_a_ctrl_c_that_some_library_swallows_during_the_checks_stops_the_command_before_the_run(tmp_path, monkeypatch):
    def check(config, *, address):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(launch, "train", lambda *_, **__: pytest.fail("the run began"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
    stopped = CliRunner().invoke(app, ["train", QUICKSTART, f"run_dir={tmp_path}"])
    assert stopped.exit_code == 130 and "treadwheel: interrupted" in stopped.output
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

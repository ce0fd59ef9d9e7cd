"""What the command line does before anything heavy is imported."""

import subprocess
import sys

from cluster.record.run_directory import RunDirectory
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

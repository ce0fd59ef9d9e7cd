"""The wheel, installed where nothing of the repository is: models and folders to begin with come with it. All kinds of folders train in
test_pages.py."""

import json
import os
import py_compile
import re
import sys
import zipfile
from pathlib import Path

import pytest

import treadwheel
from tests.integration.commands import ROOT, run

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the checkout, which leaves out what a run of it has left there."""
    folder = tmp_path_factory.mktemp("wheel")
    # As on every machine where it ran once.
    py_compile.compile(str(ROOT / "deploy/cli/application.py"))
    # What an earlier build left in the checkout would come along.
    places = folder / "places.cfg"
    places.write_text(f"[build]\nbuild_base={folder}/build\n[egg_info]\negg_base={folder}\n")
    made = run(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(ROOT),
        ),
        env={"DIST_EXTRA_CONFIG": str(places)},
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = folder.glob("treadwheel-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """A folder with the wheel's packages, which comes before the repository on the search path."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


def test_from_the_wheel_alone_a_folder_to_begin_with_learns_to_call_its_tool_and_a_script_reads_its_run(
    installed, tmp_path
):
    """Offline, from where a user stands."""
    env, command = {"PYTHONPATH": str(installed)}, [sys.executable, "-P", "-m", "deploy.cli"]
    begun = run(*command, "init", "mine", "--kind", "tools", env=env, cwd=tmp_path)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    trained = run(*command, "train", "run.yaml", env=env, cwd=tmp_path / "mine")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    logged = [json.loads(line) for line in (tmp_path / "mine/runs/tools/metrics.jsonl").read_text().splitlines()]
    called = "environment/with_multiplication/called"
    assert logged[0][called] < 0.4 and logged[-1][called] > 0.8
    opened = "import treadwheel; run = treadwheel.open_run('mine/runs/tools')"
    looked = f"{opened}; print(treadwheel.__file__, run.num_steps, run.config.model.path)"
    shown = run(sys.executable, "-P", "-c", looked, env=env, cwd=tmp_path)
    model = installed / "deploy/shows/model"
    assert shown.stdout.split() == [str(installed / "treadwheel/__init__.py"), "8", str(model)], shown.stderr
    # It has found its run file.
    refused = run(*command, "quickstart", "no_such_setting=1", env=env, cwd=tmp_path)
    assert refused.returncode == 2 and "no_such_setting" in refused.stderr, refused.stderr
    assert os.listdir(tmp_path) == ["mine"]


def test_it_has_the_packages_files_and_no_others(wheel):
    """All that is committed, but for texts that only a developer's `make docs` reads."""
    packages = ("treadwheel", "cluster", "actors", "learner", "deploy")
    committed = run("git", "ls-files", *packages, cwd=ROOT).stdout.splitlines()
    wanted = {each for each in committed if not re.fullmatch(r"deploy/docs/\w+\.md", each)}
    with zipfile.ZipFile(wheel) as files:
        assert {each for each in files.namelist() if each.split("/")[0] in packages} == wanted


def test_types_come_with_it(installed):
    assert (installed / "treadwheel/py.typed").exists()
    assert set(treadwheel.__all__) <= set((installed / "treadwheel/__init__.py").read_text().replace('"', " ").split())

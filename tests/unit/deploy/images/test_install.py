"""The installer, with a script in place of the environment's Python: nothing is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NO_LIBRARY = """
import ctypes

class CDLL:
    def __init__(self, name, *rest):
        raise OSError(name)

ctypes.CDLL = CDLL
"""


@pytest.fixture
def checkout(tmp_path):
    """Whose environment has all that is to be installed, as empty modules."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/install.sh", tmp_path / "deploy")
    modules = tmp_path / "modules"
    (imported,) = re.findall('NAMES = """(.+?)"""', (ROOT / "deploy/install.sh").read_text(encoding="utf-8"), re.DOTALL)
    for name in imported.split():
        (folder := modules.joinpath(*name.split("."))).mkdir(parents=True, exist_ok=True)
        for package in (folder, *folder.parents[: name.count(".")]):
            (package / "__init__.py").touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] || exit 0\nPYTHONPATH={modules} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def install(checkout, flavour):
    return subprocess.run(["bash", "deploy/install.sh", flavour], cwd=checkout, capture_output=True, text=True)


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_an_environment_is_of_the_flavour_that_was_installed(checkout, flavour):
    done = install(checkout, flavour)
    assert done.returncode == 0, done.stderr
    assert (checkout / ".venv/.flavour").read_text() == f"{flavour}\n"


def test_an_unknown_flavour_leaves_no_trace(checkout):
    done = install(checkout, "cup")
    assert done.returncode == 1 and "usage: deploy/install.sh cpu|gpu; got 'cup'" in done.stderr
    assert not (checkout / ".venv/.flavour").exists()


@pytest.mark.parametrize(("lacks", "code"), [("", 0), ("compiler", 1), ("Python.h", 1)])
def test_a_machine_on_which_nothing_can_be_compiled_is_told_before_anything_is_installed(checkout, lacks, code):
    """pip's own words for it are some forty lines."""
    programs = checkout / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "env", "sh", *(() if lacks == "compiler" else ("gcc",))):
        (programs / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is not here"))
    python = checkout / ".venv/bin/python"
    fails = "*pycosat*|*Python.h*" if lacks == "Python.h" else "*pycosat*"
    python.write_text(python.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\ncase "$2" in {fails}) exit 1;; esac\n'))
    command = [programs / "bash", "deploy/install.sh", "cpu"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env={"PATH": str(programs)})
    assert done.returncode == code, done.stderr
    assert ("install a C compiler and Python's headers" in done.stderr) == bool(lacks)
    assert (checkout / ".venv/.flavour").exists() == (not lacks)


@pytest.mark.parametrize(("flavour", "code"), [("cpu", 1), ("gpu", 0)])
def test_an_installation_for_cpus_without_libnuma_says_which_package_has_it(checkout, flavour, code):
    """vLLM imports without it, and its engines fail later."""
    (checkout / "modules/sitecustomize.py").write_text(NO_LIBRARY)
    done = install(checkout, flavour)
    assert done.returncode == code
    assert ("install the package libnuma1" in done.stderr) == (code == 1)

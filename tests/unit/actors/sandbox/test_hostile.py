"""Hostile programs: each is refused or ended, its parent and neighbours are unharmed, and it leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.sandbox.sandbox import Sandbox, SandboxConfig
from tests.unit.actors.sandbox.hostile import ENDED, IDLE, REFUSED

PROJECT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(SandboxConfig(memory_bytes=2**28))
    yield made
    made.close()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A neighbour and a file of the same user, and a link to the file."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "victim").write_text("secret")
    (folder / "link").symlink_to(folder / "victim")
    neighbour = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield {
        "victim": folder / "victim",
        "link": folder / "link",
        "folder": folder,
        "project": PROJECT,
        "neighbour": neighbour.pid,
    }
    neighbour.communicate(b"\n")
    assert neighbour.returncode == 0, "no program has ended its neighbour"
    assert sorted(each.name for each in folder.iterdir()) == ["link", "victim"]
    assert (folder / "victim").read_text() == "secret"


@pytest.fixture
def unharmed(sandbox):
    """The host process is the same before and after, runs the next program right, and has no process left."""
    before = sandbox._host._process.pid
    yield
    assert sandbox.run("print(input())", stdin="on").stdout == "on\n"
    assert sandbox._host._process.pid == before
    assert Path(f"/proc/{before}/task/{before}/children").read_text() == ""
    assert len(os.listdir(f"/proc/{before}/fd")) < 12, "descriptors have leaked into the host process"


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_is_refused_that(name, sandbox, machine, unharmed):
    attempt = REFUSED[name].format(**machine)
    ran = sandbox.run(f"{attempt}\nprint('escaped')")
    assert (ran.stdout, ran.verdict) == ("", "crashed")
    assert "SyntaxError" not in ran.detail and "NameError" not in ran.detail and "ImportError" not in ran.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_a_program_is_ended_that(name, sandbox, unharmed, monkeypatch):
    program, verdicts = ENDED[name]
    with monkeypatch.context() as patched:
        if "out_of_time" in verdicts:  # no other verdict may depend on how slow the machine is
            patched.setattr(sandbox, "config", sandbox.config.model_copy(update={"time_s": 0.3}))
        assert sandbox.run(program, wall_s=0.3 if name in IDLE else 60).verdict in verdicts

from subprocess import CompletedProcess

import pytest

from tests.benchmarks import peers


class Commands:
    """Runs nothing; what is installed imports."""

    def __init__(self, folder, *, pip=0):
        self._folder, self._pip = folder, pip
        self.installed = []

    def __call__(self, command, **_):
        if "install" not in command:
            return CompletedProcess(command, 0)
        self._folder.mkdir(exist_ok=True)
        self.installed.append(command[-1])
        return CompletedProcess(command, self._pip)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "peers")
    return peers.FOLDER


def test_a_peer_is_installed_once_and_again_when_a_pin_changes(folder, monkeypatch):
    run = Commands(folder)
    monkeypatch.setattr(peers.subprocess, "run", run)
    for pins in (("trl==1", "dill==1"), ("trl==1", "dill==1"), ("trl==1", "dill==2")):
        monkeypatch.setitem(peers.PEERS, "trl", pins)
        assert peers.install("trl")
    assert run.installed == ["dill==1", "dill==2"]


def test_an_older_peer_is_not_compared_with_where_the_new_one_cannot_be_fetched(folder, monkeypatch):
    monkeypatch.setattr(peers.subprocess, "run", Commands(folder))
    assert peers.install("trl")
    monkeypatch.setitem(peers.PEERS, "trl", ("trl==2",))
    monkeypatch.setattr(peers.subprocess, "run", Commands(folder, pip=1))
    assert not peers.install("trl")

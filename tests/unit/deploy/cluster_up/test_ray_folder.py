"""Nobody else enters the folder of a run's own Ray."""

import os
import tempfile
from pathlib import Path

import pytest

from cluster.contracts.errors import ConfigError
from deploy.cluster_up.ray_folder import made_private, ray_folder


@pytest.fixture
def shared(monkeypatch):
    """Its path is shorter than those of pytest's folders."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("RAY_TMPDIR", name)
        yield folder


def test_in_a_folder_of_all_users_it_is_inside_a_folder_of_its_own(shared):
    own = shared / f"ray-{os.getuid()}"
    assert [made_private(), made_private()] == [str(own / "ray")] * 2, "the next run finds it"
    assert own.stat().st_mode & 0o777 == 0o700


def test_in_a_folder_of_this_user_alone_it_has_rays_own_name(shared):
    """Names of sockets have few characters."""
    shared.chmod(0o700)
    assert made_private() == ray_folder() == str(shared / "ray")


def test_a_folder_that_others_may_enter_and_a_link_are_refused(shared, tmp_path_factory):
    own = shared / f"ray-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{own}, .* is open to other users; remove it, or set RAY_TMPDIR"):
        made_private()
    own.rmdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    own.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is open to other users"):
        made_private()


def test_a_folder_in_which_rays_sockets_have_too_long_names_is_refused(shared, monkeypatch):
    """Ray's own error came after the checks, from within."""
    longest = str(shared / ("a" * (43 - len(f"{shared}//ray-{os.getuid()}/ray"))))
    monkeypatch.setenv("RAY_TMPDIR", longest)
    socket = f"{made_private()}/session_2026-12-01_12-00-00_123456_4194304/sockets/plasma_store"
    assert len(socket) == 107, "Linux takes no longer one"
    monkeypatch.setenv("RAY_TMPDIR", f"{longest[:-1]}ü")
    with pytest.raises(ConfigError, match=r"has 44 bytes; .* leave it 43: set RAY_TMPDIR to a shorter one"):
        made_private()


def test_a_folder_that_cannot_be_made_names_the_variable(shared, monkeypatch):
    (shared / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(shared / "file"))
    with pytest.raises(ConfigError, match=r"cannot be made: .*; set RAY_TMPDIR to a folder that can be written"):
        made_private()

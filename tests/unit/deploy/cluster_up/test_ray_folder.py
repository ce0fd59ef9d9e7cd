"""Nobody else enters the folder of a run's own Ray."""

import os

import pytest

from cluster.contracts.errors import ConfigError
from deploy.cluster_up.ray_folder import made_private, ray_folder


@pytest.fixture
def shared(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


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

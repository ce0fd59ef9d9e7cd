"""The folder for sockets and logs of a run's own Ray. Ray lets all users write its folder, and its processes trust the sockets there, so it
is inside a folder that only this user may enter."""

import contextlib
import os
import stat

from cluster.contracts.errors import ConfigError

LONGEST = 43
"""Bytes of its path. Those of Ray's sockets below it, `session_<time>_<pid>/sockets/plasma_store`, may have 107."""


def ray_folder() -> str:
    """Its path; it need not exist yet. Below RAY_TMPDIR or TMPDIR, as Ray's default."""
    return os.path.join(_own(), "ray")


def made_private() -> str:
    """The path, inside a folder of mode 0700. Raises ConfigError if other users may enter that, or if the path is too long."""
    own = _own()
    if (length := len(os.fsencode(folder := ray_folder()))) > LONGEST:
        raise ConfigError(
            f"{folder}, the folder for Ray's sockets and logs, has {length} bytes; the names of sockets leave it {LONGEST}: set "
            "RAY_TMPDIR to a shorter one"
        )
    try:
        os.makedirs(own, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{own}, the folder for Ray's sockets and logs, cannot be made: {error}; set RAY_TMPDIR to a folder that can be written"
        ) from error
    if not _is_private(own):
        raise ConfigError(
            f"{own}, the folder for Ray's sockets and logs, is open to other users; remove it, or set RAY_TMPDIR to a folder of mode 0700"
        )
    return folder


def _own() -> str:
    base = os.path.abspath(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    return base if _is_private(base) else os.path.join(base, f"ray-{os.getuid()}")


def _is_private(folder: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False

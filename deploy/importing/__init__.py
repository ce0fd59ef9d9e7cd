"""Makes run files from another system's configuration. A table per system maps its settings to ours; docs/coming_from.md shows it."""

from collections.abc import Sequence
from pathlib import Path

from cluster.contracts.errors import ConfigError, StorageError
from deploy.config import loading
from deploy.config.yaml_text import parse
from deploy.importing import writing
from deploy.importing.table import imported
from deploy.importing.trl import TRL
from deploy.importing.verl import VERL
from learner.algorithms.objective import Objective

PEERS = {"trl": TRL, "verl": VERL}


def run_file(system: str, path: str, more: Sequence[str] = ()) -> str:
    """The text of a run file for a configuration of `system`. `more`: settings as `key=value`, in place of the file's.

    Raises one ConfigError for all settings that have no equivalent here, and for a run that would not be valid.
    """
    if system not in PEERS:
        raise ConfigError(f"{system!r} has no importer; choose {' or '.join(PEERS)}, or see docs/coming_from.md")
    peer = PEERS[system]
    text = writing.run_file(imported(peer.read(path, more), peer, source=path), peer, source=path)
    run = loading.validated(parse(text, source=path), source=f"the run file of {path}")
    Objective.from_config(run.algorithm, updates_per_step=run.learner.updates_per_step)
    return text


def write(path: str, text: str) -> None:
    """Raises ConfigError for a file that exists, and StorageError for a file that cannot be written."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already; name a new file") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error

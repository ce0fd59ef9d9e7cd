"""Run files made of another system's configuration: a table per system says what each of its settings is here, and is the importer.

docs/coming_from.md shows the same tables.
"""

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
    """The text of a run file for a configuration of `system`, with `more` of its settings as `key=value`.

    Raises one ConfigError for everything that cannot be said here, and for a run that would not be valid.
    """
    if system not in PEERS:
        raise ConfigError(f"{system!r} has no importer; choose {' or '.join(PEERS)}, or see docs/coming_from.md")
    peer = PEERS[system]
    text = writing.run_file(imported(peer.read(path, more), peer, source=path), peer, source=path)
    run = loading.validated(parse(text, source=path), source=f"what {path} comes to")
    Objective.from_config(run.algorithm, updates_per_step=run.learner.updates_per_step)
    return text


def write(path: str, text: str) -> None:
    """Raises ConfigError for a file that is there already, and StorageError for one that cannot be written."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; name a new file") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error

"""Reads the settings that a run directory keeps of its run."""

from typing import Any

from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import RUN_YAML, RunDirectory
from deploy.config.yaml_text import parse


def settings_in(directory: RunDirectory) -> dict[str, Any]:
    """The settings in its run.yaml. Raises ConfigError naming the file if it is damaged."""
    source = directory.path(RUN_YAML)
    try:
        values = parse(directory.read_text(RUN_YAML), source=source)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is damaged: {error}; bring it back from a copy") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} is damaged: it holds no settings, but {str(values)[:40]!r}; bring it back from a copy"
        )
    return values

"""Reads a peer's configuration as settings by full name: YAML, JSON, or the `key=value` words of a shell script."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cluster.contracts.errors import ConfigError
from cluster.contracts.settings import entries
from deploy.config.yaml_text import parse, read_text, read_yaml
from deploy.importing import script
from deploy.importing.script import Unresolved

_WAY_OUT = "name the configuration: a .yaml or .json file"


def flat(path: str, more: Sequence[str]) -> dict[str, Any]:
    """Settings of a file without sections, in which a mapping is a value. Settings of `more` (`key=value`) replace the file's.

    Raises ConfigError for a file that cannot be read, and for another form of `more`.
    """
    return {str(name): value for name, value in _mapping(path, _WAY_OUT).items()} | _overrides(more)


def hydra(path: str, more: Sequence[str]) -> dict[str, Any]:
    """As `flat`, for a hydra file or a shell script. Names of sections and settings are joined by dots. A value with an interpolation,
    `${...}`, is unresolved."""
    way_out = f"{_WAY_OUT}, or a script with key=value"
    if Path(path).suffix.lower() in (".yaml", ".yml", ".json"):
        values = dict(entries(_mapping(path, way_out)))
    else:
        values = script.settings(path, way_out=way_out)
    return {
        name: Unresolved(value) if "${" in str(value) else value for name, value in (values | _overrides(more)).items()
    }


def _overrides(more: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in more:
        found = script.WORD.fullmatch(word)
        if found is None:
            raise ConfigError(f"--set {word!r} is not of the form setting=value, such as --set learning_rate=1e-6")
        values[script.named(found)] = parse(found["text"], source=f"--set {word!r}")
    return values


def _mapping(path: str, way_out: str) -> Mapping[str, Any]:
    found = _json(path, way_out) if Path(path).suffix.lower() == ".json" else read_yaml(path, way_out=way_out)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a mapping of settings; {way_out}")
    return cast("dict[str, Any]", found)


def _json(path: str, way_out: str) -> Any:
    """Not by the YAML parser, which reads neither tabs between values nor characters above U+FFFF, which JSON writes in two halves."""
    try:
        return json.loads(read_text(path, way_out=way_out), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; correct it") from error


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is given {count} times")
    return dict(pairs)

"""What a peer's configuration says, as settings by full name: YAML or JSON, or the `key=value` words of a shell script."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, cast

from cluster.contracts.errors import ConfigError
from deploy.config.yaml_text import parse, read_yaml

_WORD = re.compile(r"(?P<mark>[+~]{0,2})(?P<name>[\w./@-]+)=(?P<text>.*)", re.DOTALL)
_WAY_OUT = "name the configuration: a .yaml or .json file, or a script with key=value"


def read(path: str, more: Sequence[str]) -> dict[str, Any]:
    """The file's settings, with those of `more` (`key=value`) in their place.

    Raises ConfigError for a file that cannot be read, and for a word of another form.
    """
    is_script = Path(path).suffix.lower() not in (".yaml", ".yml", ".json")
    values = _of_a_script(path) if is_script else _flat(_mapping(path))
    for word in more:
        found = _WORD.fullmatch(word)
        if found is None:
            raise ConfigError(f"--set {word!r} is not of the form setting=value")
        values[_named(found)] = parse(found["text"], source=f"--set {word!r}")
    return values


def _named(word: re.Match[str]) -> str:
    """Without hydra's +; a setting that hydra takes away keeps its ~, and is refused as unknown."""
    return word["name"] if word["mark"] != "~" else f"~{word['name']}"


def _mapping(path: str) -> Mapping[str, Any]:
    found = read_yaml(path, way_out=_WAY_OUT)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no settings by name; {_WAY_OUT}")
    return cast("dict[str, Any]", found)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """An empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = (
            _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.") if isinstance(value, Mapping) and value else None
        )
        found |= {f"{prefix}{key}": value} if inner is None else inner
    return found


def _of_a_script(path: str) -> dict[str, Any]:
    """Words `a.b=value` are settings. Words `name=value` are variables of the shell, which stand for `$name` and `${name}` in what
    follows; nothing else of a shell is understood, and what stays a `$` is refused where it is read. So is a variable that gets a second
    value, as which of the two a shell takes may depend on an `if`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        words = shlex.split(text, comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    variables: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None:
            continue
        written = Template(found["text"]).safe_substitute(variables)
        if "." not in found["name"] and not found["mark"] and not found["name"].startswith("-"):
            is_clear = variables.get(found["name"], written) == written
            variables[found["name"]] = written if is_clear else f"${found['name']}"
        else:
            values[_named(found)] = parse(written, source=f"{path}, {found['name']}") if "$" not in written else written
    if not values:
        raise ConfigError(f"{path} holds no settings as key=value; {_WAY_OUT}")
    return values

"""Manifests as readable YAML: keys in their order, and texts of several lines as blocks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.contracts.errors import ConfigError
from deploy.config.yaml_text import NO_VALUE, Dumper, StrictLoader
from deploy.manifests.pods import Manifest
from deploy.manifests.site import looks_secret


class _Dumper(Dumper):
    """Also quotes texts that Go's YAML, which Kubernetes uses, reads as true or false."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    written = dumper.represent_str(text)
    if "\n" in text and written.style is None:
        written.style = "|"
    return written


_Dumper.add_representer(str, _text)
# Go reads more spellings of numbers than YAML has: `0B1`, `0O17`, `1e1_0`.
_NUMBER = re.compile(r"^[-+]?(?:0_*[xXbBoO][\da-fA-F_]+|[\d_]+(?:\.[\d_]*)?[eE][-+]?[\d_]+)$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _NUMBER, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))


def dump(manifests: Sequence[Manifest], *, comment: str = "") -> str:
    """YAML of several documents. `comment` goes on top, with a "#" before each line."""
    top = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return top + yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def has_secret(written: str) -> bool:
    """Whether a text in a manifest contains a secret: YAML, such as a run file, or any other text."""
    try:
        held: Any = yaml.load(written, Loader=StrictLoader)
    except (yaml.YAMLError, *NO_VALUE):
        held = written
    return looks_secret("", held)


def read(path: str) -> list[Any]:
    """The documents of a file. Raises ConfigError for a file that is not YAML."""
    try:
        return [*yaml.load_all(Path(path).read_text(encoding="utf-8"), Loader=StrictLoader)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a manifest") from error
    except (yaml.YAMLError, *NO_VALUE) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}; correct it") from error

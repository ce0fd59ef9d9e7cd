"""A model's files: finds those with weights, refuses code that is not pinned, and computes a cheap fingerprint by which two processes check
that they loaded the same files.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError

_SAMPLE_BYTES = 4096
_SINGLE = "model.safetensors"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def refuse_unpinned_code(model: ModelConfig, *, section: str = "model") -> None:
    """Raises ConfigError for code from the hub that is not pinned to a commit, since it may change between two loads.

    `section`: the section of `model` in the run file.
    """
    if not model.trust_remote_code or Path(os.path.expanduser(model.path)).is_dir():
        return
    if model.revision is None or not _COMMIT.fullmatch(model.revision):
        raise ConfigError(
            f"{section}.trust_remote_code=true with {section}.revision={model.revision!r} runs whatever code {model.path!r} has on the day "
            f"it is loaded; set {section}.revision to the commit that you have read (40 hexadecimal digits), or give a local folder"
        )


def refuse_unpinned(path: str, revision: str | None, *, section: str) -> None:
    """Raises ConfigError for a hub name that is not pinned to a commit: a branch or tag may change."""
    if not Path(os.path.expanduser(path)).is_dir() and not _COMMIT.fullmatch(revision or ""):
        raise ConfigError(
            f"{section}.revision={revision!r}: {path!r} is no local folder; set a commit of the hub (40 hexadecimal digits)"
        )


def weight_files(file: Callable[[str], Path | None]) -> dict[str, Path | None]:
    """The safetensors files of a model by name, {} without any. None: a missing file that the index names. `file` finds files by name."""
    if (single := file(_SINGLE)) is not None:
        return {_SINGLE: single}
    index = file(f"{_SINGLE}.index.json")
    if index is None:
        return {}
    return {
        name: file(name) for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    }


def fingerprint(model: ModelConfig) -> str | None:
    """SHA-256 of all tensors' names, types, shapes and first bytes, however they are divided into files. None without safetensors files.

    Two models of one shape differ in some tensor's first bytes. A file that is altered further back is not detected here.
    """
    paths = weight_files(partial(model_file, model)).values()
    tensors = sorted(tensor for path in paths if path is not None for tensor in _tensors(path))
    return hashlib.sha256("".join(tensors).encode()).hexdigest() if tensors else None


def _tensors(path: Path) -> Iterator[str]:
    """One line for each tensor. Layout: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, the tensors)."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + header_bytes + begin)
            sample = hashlib.sha256(file.read(min(end - begin, _SAMPLE_BYTES))).hexdigest()
            yield f"{name} {entry['dtype']} {entry['shape']} {sample}\n"


def model_file(model: ModelConfig, name: str) -> Path | None:
    """The file in the model's folder or in the hub's cache; None if it is in neither."""
    folder = Path(os.path.expanduser(model.path))
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        found = try_to_load_from_cache(model.path, name, revision=model.revision)
    except HFValidationError:  # a folder that is gone, and no name of the hub
        return None
    return Path(found) if isinstance(found, str) else None

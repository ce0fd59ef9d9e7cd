"""A fingerprint of a model's files, cheap enough for every start: did two processes load the same weights?"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from cluster.contracts.config import ModelConfig

_SAMPLE_BYTES = 4096
_SINGLE = "model.safetensors"


def fingerprint(model: ModelConfig) -> str | None:
    """SHA-256 of every tensor's name, type, shape and first bytes, however they are divided into files. None without safetensors files.

    Two models of one shape differ in some tensor's first bytes; a file that is altered further back is not noticed here.
    """
    tensors = sorted(tensor for path in _files(model) for tensor in _tensors(path))
    return hashlib.sha256("".join(tensors).encode()).hexdigest() if tensors else None


def _tensors(path: Path) -> Iterator[str]:
    """One line each. Layout: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, the tensors)."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + header_bytes + begin)
            sample = hashlib.sha256(file.read(min(end - begin, _SAMPLE_BYTES))).hexdigest()
            yield f"{name} {entry['dtype']} {entry['shape']} {sample}\n"


def _files(model: ModelConfig) -> list[Path]:
    if (single := _file(model, _SINGLE)) is not None:
        return [single]
    index = _file(model, f"{_SINGLE}.index.json")
    if index is None:
        return []
    names: list[str] = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [path for name in names if (path := _file(model, name)) is not None]


def _file(model: ModelConfig, name: str) -> Path | None:
    """In the folder, or among the downloads of a hub name."""
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = try_to_load_from_cache(model.path, name, revision=model.revision)
    return Path(found) if isinstance(found, str) else None

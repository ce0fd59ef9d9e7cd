"""The files of a checkpoint. Tensors are safetensors, the rest is JSON, never pickle.

    step-000010/manifest.json    the learner's small state, and size and digest of every other file
    step-000010/model/           the weights as a Hugging Face folder, for `from_pretrained` and `vllm serve`
    step-000010/adapter/         with LoRA: the adapter alone, as a peft folder
    step-000010/state-00000-of-00001.safetensors    one per rank: float32 weights, moments, random number generator

In an object store all files but the manifest are in a folder of their save, step-000010/3f9c0a1b2d4e/model/, so that two drivers that save
the same step do not touch each other's files.

A folder without a manifest is not a checkpoint.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.record.run_directory import CHECKPOINT_MANIFEST

MANIFEST = CHECKPOINT_MANIFEST
MODEL = "model"
ADAPTER = "adapter"
OURS = "treadwheel-checkpoint"
"""In every manifest of ours, whatever its format, even a damaged one."""
FORMAT = f"{OURS}-4"
"""Raise the number when the content of `learner` or of the state files changes: what an earlier version left out cannot be restored."""
BLOCK_BYTES = 8 * 1024**2
"""State files are digested in blocks of this size (the last may be shorter): a rank checks the blocks that it reads."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size_bytes: int
    sha256: str
    """Of the file; for a file with blocks, of the concatenated digests of its blocks."""
    blocks: tuple[str, ...] = Field(default=(), exclude_if=lambda blocks: not blocks)
    """SHA-256 of each block of a state file. Other files are read whole and have none."""


class Manifest(BaseModel):
    """A checkpoint's content. Written last, with a digest of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    format: str = FORMAT
    policy_version: int
    num_ranks: int
    """Number of ranks that saved. Any number may restore."""
    parameters_digest: str
    """SHA-256 of the trained parameters' names and shapes. A checkpoint with another one is foreign."""
    base: str = Field(default="", exclude_if=lambda base: not base)
    """Fingerprint of the model files that adapters were trained on, since the state has no base weights. Empty without LoRA.

    With `algorithm.value.path` that of the critic's files follows, after a `+`; checkpoints of older versions lack it."""
    metric: float | None
    """The checkpoint's evaluation, higher is better; None is not compared."""
    rated_by: str = Field(default="", exclude_if=lambda rated_by: not rated_by)
    """Which evaluation the metric comes from: only metrics of the same one are compared. Empty for checkpoints of older versions."""
    learner: dict[str, Any]
    """The learner's small state."""
    extra: dict[str, Any]
    """The caller's data, which restore returns."""
    folder: str = Field(default="", exclude_if=lambda folder: not folder)
    """Folder of the other files, below the checkpoint's; empty for the checkpoint's own folder."""
    files: dict[str, FileEntry]
    """All other files of the checkpoint by path in that folder."""
    digest: str = ""
    """SHA-256 of all fields above; empty until sealed."""

    def sealed(self, files: Mapping[str, FileEntry]) -> "Manifest":
        """A copy with these files and the digest."""
        complete = self.model_copy(update={"files": dict(files)})
        return complete.model_copy(update={"digest": complete.own_digest()})

    def as_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    def own_digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def state_name(rank: int, num_ranks: int) -> str:
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def parameters_digest(shapes: Mapping[str, Iterable[int]]) -> str:
    """SHA-256 of names and shapes."""
    return hashlib.sha256(
        json.dumps({name: list(shape) for name, shape in sorted(shapes.items())}).encode()
    ).hexdigest()

"""What a checkpoint consists of. Tensors are safetensors, the rest JSON, never pickle.

    step-000010/manifest.json    the learner's small state, and size and digest of every other file
    step-000010/model/           the weights as a Hugging Face folder, for `from_pretrained` and `vllm serve`
    step-000010/adapter/         with LoRA: the adapter alone, as a peft folder
    step-000010/state-00000-of-00001.safetensors    one per rank: float32 weights, moments, random number generator

In an object store all but the manifest lie in a folder of the save's own between, step-000010/3f9c0a1b2d4e/model/: of two drivers that
save one step, neither touches the other's files.

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
"""Stands in every manifest of ours, whatever its format and whether or not it is whole."""
FORMAT = f"{OURS}-4"
"""Another number whenever `learner` or the state files hold something else: what an earlier version left out cannot be restored."""
BLOCK_BYTES = 8 * 1024**2
"""State files are digested in blocks of this size (the last may be shorter): a rank checks the blocks that it reads."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size_bytes: int
    sha256: str
    """Of the file; where it has blocks, of their digests one after the other."""
    blocks: tuple[str, ...] = Field(default=(), exclude_if=lambda blocks: not blocks)
    """SHA-256 of each block of a state file. Other files are read whole and have none."""


class Manifest(BaseModel):
    """What a checkpoint is. Written last, with a digest of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    format: str = FORMAT
    policy_version: int
    num_ranks: int
    """That saved; any number may restore."""
    parameters_digest: str
    """Of the trained parameters' names and shapes: another model's checkpoint is foreign."""
    base: str = Field(default="", exclude_if=lambda base: not base)
    """Fingerprint of the model's files that adapters were trained on: these hold no weights of it. Empty without LoRA."""
    metric: float | None
    """Higher is better; None is not compared."""
    rated_by: str = Field(default="", exclude_if=lambda rated_by: not rated_by)
    """What the metric is of: metrics are compared with their like alone. Empty for checkpoints of versions that did not say so."""
    learner: dict[str, Any]
    """The learner's own small state."""
    extra: dict[str, Any]
    """The caller's, given back by restore."""
    folder: str = Field(default="", exclude_if=lambda folder: not folder)
    """Where the other files lie below the checkpoint; empty for the checkpoint itself."""
    files: dict[str, FileEntry]
    """Every other file of the checkpoint by its path in that folder."""
    digest: str = ""
    """SHA-256 of everything above; empty until it is written."""

    def sealed(self, files: Mapping[str, FileEntry]) -> "Manifest":
        """With these files, and the digest."""
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

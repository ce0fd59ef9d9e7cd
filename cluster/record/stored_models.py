"""Models of checkpoints in an object store, as the local folders that transformers and vLLM load.

`s3://bucket/run/checkpoints/step-000010/model` is downloaded once on each machine, into a folder named by the files' digest, and checked
against its digests. Downloads are never removed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig, RunConfig
from cluster.contracts.errors import CheckpointError, ConfigError, StorageError
from cluster.contracts.reward_config import JudgeServerConfig, RewardModelConfig
from cluster.record.run_directory import CHECKPOINT_MANIFEST as _MANIFEST
from cluster.record.storage import Storage

CACHE_ENV = "TREADWHEEL_CACHE"
"""Environment variable with the folder of the downloads. Default: ~/.cache/treadwheel."""
_NUM_FILES = 4
"""Downloaded at a time."""

WithPath = TypeVar("WithPath", ModelConfig, ReferenceConfig, ValueConfig, RewardModelConfig, JudgeServerConfig)


def local_folder(path: str, *, field: str) -> str:
    """The model's folder on this machine. Downloads the model of a URL unless it is there. Expands the `~` of any other path.

    Raises ConfigError with `field` for a URL that is not a checkpoint's model, CheckpointError for an altered file.
    """
    if "://" not in path:
        return os.path.expanduser(path)
    checkpoint, _, name = path.rstrip("/").rpartition("/")
    try:
        storage = Storage(checkpoint)
        within, files = _files(storage, name)
        if not files:
            raise ConfigError(
                f"{field}={path!r} is no model of a checkpoint of ours; name s3://.../checkpoints/step-000010/model, "
                "a local folder or a hub name"
            )
        folder = cache() / "models" / _digest(files)
        with _alone(folder):
            if not folder.is_dir():
                _download(storage, files, folder, below=name, within=within)
    except (StorageError, OSError) as error:
        raise ConfigError(
            f"{field}={path!r} cannot be downloaded into {cache()}: {error}; {CACHE_ENV} names another folder"
        ) from error
    return str(folder)


def with_local_models(config: RunConfig) -> RunConfig:
    """The configuration with local paths of all models. Raises as `local_folder`."""
    value, reward, reference = config.algorithm.value, config.reward, config.reference
    models = {name: local_model(model, field=f"reward.models.{name}") for name, model in reward.models.items()}
    servers = {name: local_model(server, field=f"reward.servers.{name}") for name, server in reward.servers.items()}
    by_source = {
        source: local_folder(path, field=f"reference.by_source.{source}")
        for source, path in reference.by_source.items()
    }
    return config.model_copy(
        update={
            "model": local_model(config.model, field="model"),
            "reference": local_model(reference, field="reference").model_copy(update={"by_source": by_source}),
            "reward": reward.model_copy(update={"models": models, "servers": servers}),
            "algorithm": config.algorithm.model_copy(
                update={"value": value and local_model(value, field="algorithm.value")}
            ),
        }
    )


def local_model(model: WithPath, *, field: str) -> WithPath:
    """The section with a local path of its model. `field` is the section's name."""
    if model.path is None:
        return model
    path = local_folder(model.path, field=f"{field}.path")
    return model if path == model.path else model.model_copy(update={"path": path})


def cache() -> Path:
    return Path(os.path.expanduser(os.environ.get(CACHE_ENV) or "~/.cache/treadwheel"))


def _files(storage: Storage, name: str) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """(folder of the save within the checkpoint, manifest entries of the files below `name`)."""
    if not storage.exists(_MANIFEST):
        return "", {}
    try:
        manifest = json.loads(storage.read_text(_MANIFEST))
        files: dict[str, Mapping[str, Any]] = manifest["files"]
        within: str = manifest.get("folder", "")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {storage.url} was altered: {_MANIFEST} cannot be read") from error
    return within, {path: entry for path, entry in files.items() if path.startswith(f"{name}/")}


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps({name: files[name]["sha256"] for name in sorted(files)}).encode()).hexdigest()[:32]


def _download(
    storage: Storage, files: Mapping[str, Mapping[str, Any]], folder: Path, *, below: str, within: str
) -> None:
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)

    def fetch(name: str) -> None:
        target = aside / name.removeprefix(f"{below}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(posixpath.join(within, name), str(target))
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                raise CheckpointError(f"checkpoint {storage.url} was altered: {name} has another digest")

    try:
        with ThreadPoolExecutor(_NUM_FILES) as threads:
            list(threads.map(fetch, files))
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process of this machine at a time download a model. The others wait, and then find it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

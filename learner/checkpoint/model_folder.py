"""The trained model as Hugging Face folders with model cards: one with weights, configuration and tokenizer, one with the LoRA adapter."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.contracts.provenance import Provenance
from cluster.weights.adapter import write_adapter
from cluster.weights.model_files import fingerprint
from learner.checkpoint.card import NAME, Kind, model_card
from learner.checkpoint.manifest import FileEntry
from learner.checkpoint.writing import seal, write_tensors
from learner.model.loading import fetched_file
from learner.model.lora import adapter_of, adapters
from learner.model.policy import elsewhere
from learner.publishing import exported

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OF_BASE_ALONE = ("torch_dtype", "_name_or_path")
"""Fields of a base's configuration that say nothing about the saved model."""
MAX_FILE_BYTES = 4 * 1024**3
"""Weights are split into files of at most this size (one tensor at least)."""


class ModelFolder:
    """Writes the folders of one causal model."""

    def __init__(self, causal_lm: PreTrainedModel, config: RunConfig, *, base_name: str | None = None) -> None:
        """`base_name`: the base model's name in the run file, if `model.path` of `config` is the folder that it was downloaded into."""
        self._causal_lm, self._model, self._lora = causal_lm, config.model, config.learner.lora
        named = config.model.model_copy(update={"path": base_name or config.model.path})
        self._config = config.model_copy(update={"model": named})
        self.base = _base(config) if self._lora else ""
        """See `Manifest.base`."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the CPU), gathered from all ranks one at a time. Every rank must iterate, even if it writes nothing."""
        return self._on_cpu(exported(self._causal_lm, dtype=self._dtype))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's matrices, like `weights`; none without LoRA."""
        return self._on_cpu(adapters(self._causal_lm, dtype=self._dtype))

    def write(
        self, folder: Path, weights: Iterable[tuple[str, Tensor]], *, policy_version: int, extra: Mapping[str, Any]
    ) -> dict[str, FileEntry]:
        """Writes a folder for `from_pretrained`. Returns entries of all its files by path in it. `extra` is the checkpoint's."""
        entries = write_weights(folder, weights)
        self._write_configuration(folder)
        self._tokenizer.save_pretrained(folder)
        for name, content in self._processor_files.items():
            (folder / name).write_bytes(content)
        self._write_card(folder, "model", policy_version, extra)
        return _sealed(folder, besides=entries)

    def write_adapter(
        self, folder: Path, adapter: Iterable[tuple[str, Tensor]], *, policy_version: int, extra: Mapping[str, Any]
    ) -> dict[str, FileEntry]:
        """Writes a folder for peft, like `write`; nothing without LoRA."""
        if self._lora is None:
            return {}
        described = adapter_of(self._causal_lm, lora=self._lora)
        base = self._config.model
        write_adapter(folder, adapter, adapter=described, base_model=base.path, revision=base.revision)
        self._write_card(folder, "adapter", policy_version, extra)
        return _sealed(folder, besides={})

    def check(self) -> None:
        """Raises ConfigError for a model whose configuration cannot be written: no checkpoint could be saved.

        The tokenizer is not tried: a large one takes seconds.
        """
        # A full temporary disk says nothing about the run's disk.
        with contextlib.suppress(OSError), TemporaryDirectory() as folder:
            try:
                self._write_configuration(Path(folder))
            except (ValueError, TypeError, StrictDataclassError) as error:
                raise ConfigError(
                    f"model.path={self._model.path!r} loads, but transformers does not write its configuration back, so no checkpoint "
                    f"could be saved: {headline(error)}; mend its config.json"
                ) from error

    def read_ahead(self) -> None:
        """Reads the base's files that every save writes: its folder may be removed while the run learns."""
        _ = self._tokenizer, self._processor_files

    def size_bytes(self) -> int:
        """Bytes of the whole weights, as written."""
        return sum(parameter.numel() for parameter in self._causal_lm.parameters()) * self._dtype.itemsize

    def _write_configuration(self, folder: Path) -> None:
        config = type(self._causal_lm.config).from_dict(self._causal_lm.config.to_dict())
        config.dtype = self._model.dtype
        config.architectures = [type(self._causal_lm).__name__]
        config.save_pretrained(folder)
        written = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        whole = json.dumps(with_missing_fields(written, self._base_configuration), indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(whole, encoding="utf-8")
        generation = self._causal_lm.generation_config
        if generation is None:
            return
        try:
            generation.save_pretrained(folder)
        except ValueError:
            # transformers loads values that it refuses to save, such as a temperature without do_sample. Keep the base's values.
            generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])

    def _write_card(self, folder: Path, kind: Kind, policy_version: int, extra: Mapping[str, Any]) -> None:
        provenance = Provenance.of(extra)
        card = model_card(
            self._config, kind=kind, policy_version=policy_version, provenance=provenance, base=self._model
        )
        (folder / NAME).write_text(card, encoding="utf-8")

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._model.dtype)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self._model.path, revision=self._model.revision, trust_remote_code=self._model.trust_remote_code
        )
        if self._model.chat_template is not None:  # the template of the training; an empty text means no template
            tokenizer.chat_template = self._model.chat_template or None
        return tokenizer

    @cached_property
    def _base_configuration(self) -> dict[str, Any]:
        found = fetched_file(self._model, CONFIG_NAME)
        return {} if found is None else json.loads(found.read_text(encoding="utf-8"))

    @cached_property
    def _processor_files(self) -> dict[str, bytes]:
        """Files that a model which also takes images or audio needs to load; empty for a model of text alone."""
        config = self._causal_lm.config
        if config.get_text_config() is config:
            return {}
        found = {name: fetched_file(self._model, name) for name in _PROCESSOR_FILES}
        return {name: file.read_bytes() for name, file in found.items() if file is not None}

    @staticmethod
    def _on_cpu(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.cpu()) for name, tensor in named)


def with_missing_fields(written: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the base's fields that it lacks, nested ones too. transformers 5 renames some (`rope_theta` is within
    `rope_parameters`), and software that reads the old names computes with their defaults, without a word."""
    if written.get("model_type") != base.get("model_type"):
        # Of a model that also takes images, the text model alone may be written.
        text = base.get("text_config")
        is_text = isinstance(text, dict) and text.get("model_type") == written.get("model_type")
        return with_missing_fields(written, cast(dict[str, Any], text)) if is_text else dict(written)
    lost = {name: value for name, value in base.items() if name not in written and name not in _OF_BASE_ALONE}
    nested = {
        name: with_missing_fields(value, base[name])
        for name, value in written.items()
        if name.endswith("_config") and isinstance(value, dict) and isinstance(base.get(name), dict)
    }
    return {**lost, **written, **nested}


def _base(config: RunConfig) -> str:
    value = config.algorithm.value
    models = [config.model]
    if value is not None and value.path is not None:
        models.append(elsewhere(config.model, value, section="algorithm.value"))
    return "+".join(fingerprint(model) or "" for model in models)


def write_weights(folder: Path, named: Iterable[tuple[str, Tensor]]) -> dict[str, FileEntry]:
    """Writes safetensors files under the names that transformers expects, with one file's tensors in memory at a time."""
    parts: list[FileEntry] = []
    places: dict[str, int] = {}
    size_bytes = 0
    for number, tensors in enumerate(_parts(named), start=1):
        parts.append(write_tensors(folder / f"part-{number}", tensors))
        places |= dict.fromkeys(tensors, number)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        # The loop would hold them while the next file's tensors are gathered.
        tensors.clear()
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names, start=1):
        os.rename(folder / f"part-{number}", folder / name)
    entries = dict(zip(names, parts, strict=True))
    if len(parts) > 1:
        index = folder / "model.safetensors.index.json"
        weight_map = {name: names[place - 1] for name, place in places.items()}
        index.write_text(json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": weight_map}))
        entries[index.name] = seal(index)
    return entries


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most MAX_FILE_BYTES together."""
    part: dict[str, Tensor] = {}
    used = 0
    for name, tensor in named:
        if part and used + tensor.nbytes > MAX_FILE_BYTES:
            yield part
            part, used = {}, 0
        part[name] = tensor
        used += tensor.nbytes
    yield part


def _sealed(folder: Path, *, besides: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Entries of all files below `folder`. Files in `besides` have theirs already."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    named = ((path.relative_to(folder).as_posix(), path) for path in found)
    return {name: besides.get(name) or seal(path) for name, path in named}

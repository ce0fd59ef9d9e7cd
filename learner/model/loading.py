"""Loads a model into the shards of several ranks. A rank that streams holds no more than its shards and part of one tensor.

`skeleton` builds the model without memory for its weights. Once it is sharded, each rank reads its own rows from the safetensors files in
`load_shards`. Rows cannot be read alone if the stored form differs from the computed one (fused experts, other files than safetensors):
rank 0 then loads the whole model and sends it tensor by tensor.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils.hub import cached_file

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.weights.model_files import weight_files
from learner.distributed import Ranks, fill, own_rows
from learner.model.critic import Networks
from learner.model.frozen import built_empty, frozen, make_buffers
from learner.model.lora import drawn_adapters, is_adapter
from learner.model.policy import ModelKind, attention_of, load, load_backbone, without_dropout
from learner.shape import read_config

_PLAIN = ("F64", "F32", "F16", "BF16")
"""Types, by safetensors' names, that need no conversion but a cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    is_plain: bool
    """False for types that need other tensors to be interpreted."""

    def rows(self, rows: slice) -> Tensor:
        """Reads through a mapping of its own, so that the file's pages are released with it."""
        with safe_open(self.path, framework="pt") as file:
            # A scalar has no rows.
            return file.get_slice(self.name)[rows] if self.shape else file.get_tensor(self.name)


def skeleton(
    model: ModelConfig, *, kind: ModelKind = AutoModelForCausalLM, field: str = "model.path"
) -> PreTrainedModel:
    """The model in float32 without memory for its parameters. Buffers have values, dropout is off. Raises ConfigError as `load` does."""
    config = read_config(model, field=field)
    try:
        built: PreTrainedModel = built_empty(
            kind,
            config,
            attn_implementation=attention_of(model, config),
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}={model.path!r} does not load: {headline(error)}") from error
    # Building without memory made tied parameters separate.
    built.tie_weights()
    make_buffers(built, frozen(built))
    without_dropout(built)
    # A folder may lack generation defaults; those in the model's configuration apply then.
    with contextlib.suppress(OSError):
        built.generation_config = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    return built.eval()


def materialise(module: nn.Module, *, device: torch.device) -> None:
    """Allocates memory for shards, without values. Buffers keep their values; tied shards stay tied, since torch swaps them in place."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    module.to_empty(device=device)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])


@torch.no_grad()
def load_shards(
    networks: Networks, *, model: ModelConfig, critic: ModelConfig | None, ranks: Ranks, seed: int
) -> Literal["streamed", "sent by rank 0"]:
    """Writes every parameter of the sharded networks: the model's from its files, the critic's backbone from `critic`'s files, adapters
    drawn from the seed, the value head from `critic`'s score or 0.

    All ranks must call it. They stream only if every rank can.
    """
    ways = {_load(networks.policy.causal_lm, model=model, ranks=ranks, seed=seed)}
    if (own := networks.critic) is not None:
        for parameter in own.value_head.parameters():
            parameter.zero_()
        if own.backbone is not None and critic is not None:
            ways.add(_load(own.backbone, model=critic, ranks=ranks, seed=seed))
            own.start_head(read_score(critic))
    return "streamed" if ways == {"streamed"} else "sent by rank 0"


def _load(
    source: PreTrainedModel, *, model: ModelConfig, ranks: Ranks, seed: int
) -> Literal["streamed", "sent by rank 0"]:
    """Fills parameters and buffers of a sharded causal model or backbone."""
    tensors: dict[str, Tensor] = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    drawn = drawn_adapters(source, seed=seed)
    for name, value in drawn.items():
        fill(tensors[name], value.to(ranks.device))
    wanted = {_stored_name(name): tensor for name, tensor in tensors.items() if name not in drawn}
    stored = _stored_as_computed(source, model=model)
    num_able = ranks.sum(torch.tensor(0 if stored is None else 1, device=ranks.device))
    if stored is not None and int(num_able) == ranks.size:
        _stream(wanted, stored=stored)
        return "streamed"
    _send(wanted, source=source, model=model, ranks=ranks)
    return "sent by rank 0"


def read_score(model: ModelConfig) -> Tensor | None:
    """The score of a reward model of one label, [1, H] (transformers' `...ForSequenceClassification`); None without one."""
    found = next((tensor for tensor in stored_tensors(model) if tensor.name == "score.weight"), None)
    return found.rows(slice(None)) if found is not None and found.is_plain and found.shape[0] == 1 else None


def _stream(wanted: Mapping[str, Tensor], *, stored: Mapping[str, StoredTensor]) -> None:
    for name, tensor in wanted.items():
        if isinstance(tensor, DTensor):
            rows = own_rows(tensor)
            if rows.stop > rows.start:
                tensor.to_local().copy_(stored[name].rows(rows))
        elif name in stored:
            # Other buffers were computed with the skeleton.
            tensor.copy_(stored[name].rows(slice(None)))


def _send(wanted: Mapping[str, Tensor], *, source: PreTrainedModel, model: ModelConfig, ranks: Ranks) -> None:
    whole: dict[str, Tensor] = {}
    if ranks.rank == 0:
        loaded = load_backbone(model) if _is_backbone(source) else load(model, dtype=torch.float32)
        whole = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        # So that exports reverse these conversions.
        source._weight_conversions = loaded._weight_conversions
        del loaded
    for name, tensor in wanted.items():
        value = whole.pop(name) if ranks.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
        fill(tensor, ranks.from_rank_0(value.to(ranks.device).contiguous()))


def _stored_as_computed(source: PreTrainedModel, *, model: ModelConfig) -> dict[str, StoredTensor] | None:
    """Stored tensors of the source's state dict, by name. None unless parameters are stored as computed, up to a cast, and buffers too."""
    if any(isinstance(x, WeightConverter) for x in get_model_conversion_mapping(source, add_legacy=False)):
        return None
    # A backbone may be stored as part of a causal model or of a reward model.
    prefix = f"{source.base_model_prefix}." if _is_backbone(source) else ""
    stored = {tensor.name.removeprefix(prefix): tensor for tensor in stored_tensors(model)}
    for names, parameter in _tied(source):
        if is_adapter(names[0]):
            continue
        # Tied parameters are stored under any of their names.
        plain = [_stored_name(name) for name in names]
        found = next((stored[name] for name in plain if name in stored), None)
        if found is None or not found.is_plain or found.shape != tuple(parameter.shape):
            return None
        stored |= dict.fromkeys(plain, found)
    kept = [_stored_name(name) for name in source.state_dict() if not is_adapter(name)]
    if any(name not in stored for name in kept):
        return None
    # Old files also have buffers that are computed now, perhaps rounded.
    return {name: stored[name] for name in kept}


def stored_tensors(model: ModelConfig) -> Iterator[StoredTensor]:
    """Tensors of all the model's safetensors files. A hub name's files are downloaded once."""
    for path in weight_files(partial(fetched_file, model)).values():
        if path is None:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                stored = file.get_slice(name)
                is_plain = stored.get_dtype() in _PLAIN
                yield StoredTensor(path=path, name=name, shape=tuple(stored.get_shape()), is_plain=is_plain)


def fetched_file(model: ModelConfig, name: str) -> Path | None:
    """The file in the model's folder or on the hub, from which it is downloaded; None if the model has none."""
    found = cached_file(
        model.path,
        name,
        revision=model.revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _is_backbone(source: PreTrainedModel) -> bool:
    return source.base_model is source


def _stored_name(name: str) -> str:
    """The name without peft's insertion."""
    return name.replace(".base_layer.", ".")


def _tied(module: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter with all its names."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return [(names, parameter) for parameter, names in found.items()]

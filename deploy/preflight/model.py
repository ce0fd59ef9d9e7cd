"""Checks of the models: their files are whole, the tokenizer loads, and they have the layers that the run names."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from cluster.contracts.algorithm_config import ValueConfig
from cluster.contracts.config import ModelConfig, ReferenceConfig, RewardConfig, RunConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.contracts.importing import importing
from deploy.formatters import load_formatter
from deploy.preflight.engine_memory import caches_latents, check_divisible
from deploy.preflight.quantization import check_layers
from learner.shape import head_size, read_config, sizes

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from actors.reward_model import Reading

_ABSORBED = "kv_b_proj"
"""Layer of latent attention that makes keys and values of the latent."""
HEADS_ON_CPUS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM's attention on CPUs computes, from its CPUAttentionBackend, whose import takes seconds."""
_LFS_POINTER = b"version https://git-lfs"


def formatter_of(config: RunConfig) -> "ChatFormatter":
    check_folder(config.model.path, field="model.path")
    hush_hub()
    return load_formatter(config.model)


def hush_hub() -> None:
    """Hides the hub's log line per retry: an unreachable hub is one error of ours."""
    import huggingface_hub as hub  # its import sets the level

    logging.getLogger(hub.__name__).setLevel(logging.ERROR)


def check_reference(config: RunConfig) -> None:
    """Raises ConfigError for a reference model that does not load, has another vocabulary, or would run code that no commit pins."""
    if config.reference.path is None and not config.reference.by_source:
        return  # before a slow import
    from learner.model.reference import reference_models

    _check_second(config, config.reference, section="reference")
    for source, model in reference_models(config.model, config.reference).items():
        if source is not None:
            _check_loads(model, config, field=f"reference.by_source.{source}")


def readings(reward: RewardConfig) -> dict[str, "Reading"]:
    """The reward models without their weights, by name. Raises ConfigError for a model that cannot read or judge."""
    if not reward.models:
        return {}  # before a slow import
    from actors.reward_model import Reading

    for name, model in reward.models.items():
        check_folder(model.path, field=f"reward.models.{name}.path")
    return {name: Reading(model, field=f"reward.models.{name}") for name, model in reward.models.items()}


def check_critic(config: RunConfig) -> None:
    """As `check_reference`, for the model that a critic starts from. It must also have the policy's architecture."""
    value = config.algorithm.value
    if value is None or value.path is None:
        return
    with importing():
        from transformers import AutoModel

        from learner.model.critic import refuse_another_architecture
        from learner.model.loading import skeleton

    own = _plain(_check_second(config, value, section="algorithm.value"))
    like = skeleton(_plain(config.model))
    refuse_another_architecture(skeleton(own, kind=AutoModel, field="algorithm.value.path"), like=like, path=value.path)


def _check_second(config: RunConfig, place: ReferenceConfig | ValueConfig, *, section: str) -> ModelConfig:
    from learner.model.policy import elsewhere

    if place.path is None:
        return config.model
    second = elsewhere(config.model, place, section=section)
    _check_loads(second, config, field=f"{section}.path")
    return second


def _check_loads(second: ModelConfig, config: RunConfig, *, field: str) -> None:

    check_folder(second.path, field=field)
    read_config(second, field=field)
    _check_vocabulary(second, policy=config.model, field=field)


def check_folder(path: str, *, field: str) -> None:
    """Raises ConfigError for a local folder that is missing or damaged. transformers would look it up on the hub, and fail late."""
    try:
        _check_folder(Path(os.path.expanduser(path)), path, field=field)
    except OSError as error:
        raise ConfigError(
            f"{field}={path!r}: {error.filename or path} cannot be read: {error.strerror}; make it readable, or copy it again"
        ) from error


def refuse_absent(path: str, *, field: str) -> None:
    """Raises ConfigError for a path that can only be a local one and does not exist, and OSError if it cannot be looked up."""
    if not Path(os.path.expanduser(path)).exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ConfigError(
            f"{field}={path!r} does not exist; give a Hugging Face folder, or a hub name such as org/model"
        )


def _check_folder(folder: Path, path: str, *, field: str) -> None:
    refuse_absent(path, field=field)
    if not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{field}={path!r} has no config.json; give a Hugging Face model folder")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{field}={path!r} has no *.safetensors file; save the model with save_pretrained")
    for file in files:
        _check_whole(file, field=field)
    _check_complete(folder, field=field)
    from learner.checkpoint.reading import verify_model

    verify_model(folder)


def check_room(config: RunConfig, formatter: "ChatFormatter") -> int:
    """Largest number of tokens of a prompt. Raises ConfigError if it is not above 0."""
    if config.sampling.max_tokens >= formatter.max_context:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the context of {formatter.max_context} "
            "tokens; lower it, or raise model.max_context"
        )
    return formatter.max_context - config.sampling.max_tokens


def check_shares(config: RunConfig) -> None:
    """Raises ConfigError for a model that an engine cannot split over its processes."""
    if config.rollout.tensor_parallel_size > 1:
        check_divisible(read_config(config.model).get_text_config(), config.rollout.tensor_parallel_size)


def check_heads(config: RunConfig) -> None:
    """Raises ConfigError for a model whose heads vLLM's attention on CPUs cannot compute: an engine would end at its first tokens."""
    if config.rollout.gpus_per_worker > 0:
        return

    text = read_config(config.model).get_text_config()
    # Latent attention has kernels of its own.
    if not getattr(text, "num_attention_heads", None) or getattr(text, "kv_lora_rank", None):
        return
    if others := sorted((sizes(text, "head_dim") or {head_size(text)}).difference(HEADS_ON_CPUS)):
        raise ConfigError(
            f"model.path={config.model.path!r} has attention heads of size {others[0]}, and vLLM's attention on CPUs computes the sizes "
            f"{', '.join(map(str, HEADS_ON_CPUS))}; use another model, or engines on GPUs with rollout.gpus_per_worker=1"
        )


def check_biased_tokens(config: RunConfig) -> None:
    """Raises ConfigError for a token of `sampling.logit_bias` that the model lacks: an engine would refuse every prompt."""
    if biased := config.sampling.logit_bias:
        size = read_config(config.model).get_text_config().vocab_size
        if unknown := [token for token in biased if token >= size]:
            raise ConfigError(
                f"sampling.logit_bias names the token {unknown[0]}, and the model has the tokens 0 to {size - 1}; leave it out"
            )


def check_quantized_layers(config: RunConfig) -> None:
    """Raises ConfigError for a model whose layers `rollout.quantization` cannot quantize."""
    if config.rollout.quantization is not None:
        check_layers(read_config(config.model).get_text_config(), config)


def check_attention(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError for an attention that cannot run. Only a local run needs the package on this machine."""
    if config.model.attention != "flash_attention_2":
        return
    named = "model.attention='flash_attention_2'"
    if config.learner.gpus_per_rank == 0:
        raise ConfigError(
            f"{named} runs only on GPUs, and learner.gpus_per_rank=0; use model.attention=auto, or set learner.gpus_per_rank=1"
        )
    if config.model.dtype == "float32":
        raise ConfigError(f"{named} with model.dtype='float32': it computes in bfloat16; use model.dtype=bfloat16")
    if is_local and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            f"{named} needs the package flash_attn, which is not installed; install it, or use model.attention=auto"
        )


def check_soft_cap(config: RunConfig) -> None:
    """Raises ConfigError for an attention that ignores the model's soft cap on attention scores."""
    if config.model.attention == "sdpa":
        from learner.model.policy import attention_of

        attention_of(config.model, read_config(config.model))


def check_compiler(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError if the learner's layers cannot be compiled. Only a local run needs the compiler on this machine."""
    if not config.learner.compile or config.learner.gpus_per_rank > 0 or not is_local:
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"learner.compile=true needs a C++ compiler on CPUs, and {compiler!r} is not installed; install g++, name another compiler in "
            "the environment variable CXX, or leave learner.compile out"
        )


def check_sequence_parallel(config: RunConfig) -> None:
    """Raises ConfigError for models whose passes ranks cannot share."""
    if config.learner.sequence_parallel_size == 1:
        return
    from learner.model.critic import check_sequence_parallel

    check_sequence_parallel(config)


def check_adapters(config: RunConfig) -> None:
    """Raises ConfigError for adapters that do not fit the model's layers. The model is built without its weights."""
    lora = config.learner.lora
    if lora is None:
        return
    from learner.model.loading import skeleton
    from learner.model.lora import adapter_of, add_adapters, linear_layers
    from learner.shape import has_experts

    causal_lm = skeleton(_plain(config.model))
    text = causal_lm.config.get_text_config()
    if has_experts(text) and lora.publish == "adapter" and not config.rollout.gpus_per_worker:
        raise ConfigError(
            "learner.lora.publish='adapter' with a mixture of experts and engines on CPUs: vLLM supports adapters beside experts only on "
            "GPUs; use learner.lora.publish=merged"
        )
    if lora.target_modules != "all-linear":
        _check_targets(lora.target_modules, linear_layers(causal_lm))
    add_adapters(causal_lm, lora=lora, seed=config.seed)
    targets = adapter_of(causal_lm, lora=lora).target_modules
    if lora.publish == "adapter" and _ABSORBED in targets and caches_latents(text):
        raise ConfigError(
            f"learner.lora.publish='adapter' with an adapter on {_ABSORBED}: vLLM samples with copies of that layer that lack the adapter, "
            "and no probe shows it; name the other layers in learner.lora.target_modules, or use learner.lora.publish=merged"
        )


def check_routing(config: RunConfig) -> None:
    """Raises ConfigError for `rollout.routing_replay` of a model whose routing cannot be replayed. It is built without its weights."""
    if not config.rollout.routing_replay:
        return
    from learner.model.loading import skeleton
    from learner.model.routing import Routing

    Routing(skeleton(_plain(config.model)))


def _check_vocabulary(second: ModelConfig, *, policy: ModelConfig, field: str) -> None:
    """Raises ConfigError if an id means another token to the second model, which reads the policy's token ids."""
    ours, theirs = _vocabulary(policy), _vocabulary(second)
    token = next((token for token, index in ours.items() if theirs and theirs.get(token) != index), None)
    if token is not None:
        raise ConfigError(
            f"{field}={second.path!r} has another vocabulary: token {token!r} has the id {ours[token]} in the policy's and "
            f"{theirs.get(token, 'none')} in its own; take a model with the policy's tokenizer"
        )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """Token to id. Empty for a model without a tokenizer."""
    from transformers import AutoTokenizer

    from actors.chat.hub import is_empty

    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, **options)
    except (OSError, ValueError):
        return {}
    return {} if is_empty(tokenizer) else tokenizer.get_vocab()


def _check_targets(targets: Sequence[str], linear: Sequence[str]) -> None:
    missing = [each for each in targets if not any(name == each or name.endswith(f".{each}") for name in linear)]
    if missing:
        known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise ConfigError(
            f"learner.lora.target_modules={list(targets)!r}: no linear layer of the model is named {', '.join(map(repr, missing))}; "
            f"it has: {', '.join(known)}"
        )


def _plain(model: ModelConfig) -> ModelConfig:
    """With an attention that runs everywhere: `check_attention` checks the one of the run."""
    return model.model_copy(update={"attention": "auto"})


def _check_complete(folder: Path, *, field: str) -> None:
    """Raises ConfigError if files are missing that the index of safetensors files names."""
    from cluster.weights.model_files import weight_files

    try:
        found = weight_files(lambda name: folder / name if (folder / name).is_file() else None)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{field}={str(folder)!r}: its index of safetensors files cannot be read ({headline(error)}); copy or download it again"
        ) from error
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ConfigError(
            f"{field}={str(folder)!r} lacks {', '.join(missing)}, which its index names; copy or download the model again"
        )


def _check_whole(file: Path, *, field: str) -> None:
    """Raises ConfigError for a file that is shorter or longer than its header says."""
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ConfigError(
                f"{field}: {file} is a pointer of Git LFS and not the weights; fetch them with `git lfs pull`"
            )
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{field}: {file} ({file.stat().st_size:,} bytes) is not a whole safetensors file: {headline(error)}; copy or download it again"
        ) from error

"""The model: its files are whole, its tokenizer loads, its layers are there by the names that the run gives them."""

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

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from actors.reward_model import Reading

_ABSORBED = "kv_b_proj"
"""The layer that makes keys and values of a latent."""
_LFS_POINTER = b"version https://git-lfs"


def formatter_of(config: RunConfig) -> "ChatFormatter":
    check_folder(config.model.path, field="model.path")
    hush_hub()
    return load_formatter(config.model)


def hush_hub() -> None:
    """A hub out of reach is one error, not a line per retry."""
    import huggingface_hub as hub  # sets a level of its own when it is imported

    logging.getLogger(hub.__name__).setLevel(logging.ERROR)


def check_reference(config: RunConfig) -> None:
    """Raises ConfigError for a reference model that does not load, has another vocabulary, or would run code that no commit pins."""
    if config.reference.path is None and not config.reference.by_source:
        return  # it is the policy, and what follows imports transformers' models
    from learner.model.reference import reference_models

    _check_second(config, config.reference, section="reference")
    for source, model in reference_models(config.model, config.reference).items():
        if source is not None:
            _check_loads(model, config, field=f"reference.by_source.{source}")


def readings(reward: RewardConfig) -> dict[str, "Reading"]:
    """Of the reward models, without their weights. Raises ConfigError for one that cannot read or judge."""
    if not reward.models:
        return {}  # what follows imports transformers
    from actors.reward_model import Reading

    for name, model in reward.models.items():
        check_folder(model.path, field=f"reward.models.{name}.path")
    return {name: Reading(model, field=f"reward.models.{name}") for name, model in reward.models.items()}


def check_critic(config: RunConfig) -> None:
    """The same for the model that a critic starts from, which must be of the policy's architecture, too."""
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
    from learner.model.policy import read_config

    check_folder(second.path, field=field)
    read_config(second, field=field)
    _check_vocabulary(second, policy=config.model, field=field)


def check_folder(path: str, *, field: str) -> None:
    """A path that can only be a local one must be there, with whole files: a hub look-up of it would fail late and say something else."""
    try:
        _check_folder(Path(os.path.expanduser(path)), path, field=field)
    except OSError as error:
        raise ConfigError(
            f"{field}={path!r}: {error.filename or path} cannot be read: {error.strerror}; let it be read, or copy it again"
        ) from error


def refuse_absent(path: str, *, field: str) -> None:
    """Raises OSError for one that cannot be looked up."""
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
        raise ConfigError(
            f"{field}={path!r} has no *.safetensors; save the model with save_pretrained, which writes them"
        )
    for file in files:
        _check_whole(file, field=field)
    _check_complete(folder, field=field)
    from learner.checkpoint.reading import verify_model

    verify_model(folder)


def check_room(config: RunConfig, formatter: "ChatFormatter") -> int:
    """Tokens that a prompt may have. Raises ConfigError if there are none."""
    if config.sampling.max_tokens >= formatter.max_context:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the context of {formatter.max_context} "
            "tokens; lower it, or raise model.max_context"
        )
    return formatter.max_context - config.sampling.max_tokens


def check_shares(config: RunConfig) -> None:
    """Raises ConfigError for a model that cannot be dealt out to an engine's processes."""
    if config.rollout.tensor_parallel_size > 1:
        from learner.model.policy import read_config

        check_divisible(read_config(config.model).get_text_config(), config.rollout.tensor_parallel_size)


def check_quantized_layers(config: RunConfig) -> None:
    """Raises ConfigError for a model whose layers `rollout.quantization` does not take."""
    if config.rollout.quantization is not None:
        from learner.model.policy import read_config

        check_layers(read_config(config.model).get_text_config(), config)


def check_attention(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError for an implementation that cannot run. Another cluster may have packages that this machine lacks."""
    if config.model.attention != "flash_attention_2":
        return
    named = "model.attention='flash_attention_2'"
    if config.learner.gpus_per_rank == 0:
        raise ConfigError(
            f"{named} runs on GPUs only, learner.gpus_per_rank=0; use model.attention=auto, or set learner.gpus_per_rank=1"
        )
    if config.model.dtype == "float32":
        raise ConfigError(f"{named} with model.dtype='float32': it computes in bfloat16; use model.dtype=bfloat16")
    if is_local and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            f"{named} needs the package flash_attn, not installed here; install it, or use model.attention=auto"
        )


def check_soft_cap(config: RunConfig) -> None:
    """Raises ConfigError for an implementation that leaves out a soft cap of the model's attention."""
    if config.model.attention == "sdpa":
        from learner.model.policy import attention_of, read_config

        attention_of(config.model, read_config(config.model))


def check_compiler(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError where the learner's layers cannot be compiled. Another cluster may have a compiler that this machine lacks."""
    if not config.learner.compile or config.learner.gpus_per_rank > 0 or not is_local:
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"learner.compile=true needs a C++ compiler on CPUs, and {compiler!r} is not here; install g++, name another one in the "
            "environment variable CXX, or leave learner.compile out"
        )


def check_sequence_parallel(config: RunConfig) -> None:
    """Raises ConfigError for models that ranks cannot share the passes of."""
    if config.learner.sequence_parallel_size == 1:
        return
    from learner.model.critic import check_sequence_parallel

    check_sequence_parallel(config)


def check_adapters(config: RunConfig) -> None:
    """Raises ConfigError for adapters that the model, built without its weights, has no layers for or does not take."""
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
            "learner.lora.publish='adapter' with a mixture of experts and engines on CPUs: vLLM computes the experts of a model with "
            "adapters on GPUs alone; use learner.lora.publish=merged"
        )
    if lora.target_modules != "all-linear":
        _check_targets(lora.target_modules, linear_layers(causal_lm))
    add_adapters(causal_lm, lora=lora, seed=config.seed)
    targets = adapter_of(causal_lm, lora=lora).target_modules
    if lora.publish == "adapter" and _ABSORBED in targets and caches_latents(text):
        raise ConfigError(
            f"learner.lora.publish='adapter' with an adapter on {_ABSORBED}: vLLM samples by copies of the layer that are without "
            "its adapter, and no probe shows it; name the other layers in learner.lora.target_modules, or use learner.lora.publish=merged"
        )


def check_routing(config: RunConfig) -> None:
    """Raises ConfigError where routing is replayed, for a model, built without its weights, of whose experts none can be."""
    if not config.rollout.routing_replay:
        return
    from learner.model.loading import skeleton
    from learner.model.routing import Routing

    Routing(skeleton(_plain(config.model)))


def _check_vocabulary(second: ModelConfig, *, policy: ModelConfig, field: str) -> None:
    """The second model reads the policy's token ids. Raises ConfigError for one to which an id means another token."""
    ours, theirs = _vocabulary(policy), _vocabulary(second)
    token = next((token for token, index in ours.items() if theirs and theirs.get(token) != index), None)
    if token is not None:
        raise ConfigError(
            f"{field}={second.path!r} has another vocabulary: token {token!r} is {ours[token]} in the policy's and "
            f"{theirs.get(token, 'not there')} in its own; take a model with the policy's tokenizer"
        )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """Empty for a model without a tokenizer at hand."""
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
    """With an attention that runs everywhere: what attention there is, is a question of its own."""
    return model.model_copy(update={"attention": "auto"})


def _check_complete(folder: Path, *, field: str) -> None:
    """By the index, which names the files of a model that is divided into several."""
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
    """By its header, which says how long the file is."""
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

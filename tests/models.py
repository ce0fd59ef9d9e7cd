"""Tiny random models with a character-level tokenizer, made on the fly: real architectures at a size that starts at once."""

import copy
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.model_shapes import SHAPES

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def make_tiny_model(
    path: Path | str,
    *,
    tied: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    vocab_size: int = 128,
    architecture: Literal["qwen3", "llama", "gemma3", "qwen3_moe"] = "qwen3",
    adds_bos: bool = False,
    pad_is_eos: bool = False,
    chat_template: str | None = None,
    max_context: int = 256,
    hidden_size: int = 64,
    seed: int = 0,
) -> Path:
    """A Hugging Face folder with about 200k random parameters; vocabulary beyond the characters is padding that can be sampled.

    Weights are drawn wide enough that log-probs differ clearly from uniform, and from one seed to the next.
    """
    folder = Path(path)
    tokenizer = make_tokenizer(adds_bos=adds_bos, pad_is_eos=pad_is_eos, chat_template=chat_template)
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={vocab_size} is below the tokenizer's {len(tokenizer)}")
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # Wide: the default 0.02 gives nearly uniform log-probs, which would hide stale weights.
        "initializer_range": 0.2,
    }
    # Drawn in float32 whatever the dtype, so that a bfloat16 model is the rounded float32 one.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _build(architecture, shared)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_reward_model(path: Path | str, *, num_labels: int = 1, seed: int = 1, **options: Any) -> Path:
    """`make_tiny_model` with a score in place of the vocabulary head, as transformers saves a sequence classifier."""
    folder = make_tiny_model(path, seed=seed, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels)
    model.save_pretrained(folder)
    return folder


def save_model(make: Callable[[], PreTrainedModel], folder: Path, *, dtype: str) -> Path:
    """Random weights and a tokenizer of characters. Tokens beyond its own are sampled as any other."""
    tokenizer = make_tokenizer()
    model = make()
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def half_a_billion(folder: Path) -> Path:
    """The shape of Qwen2.5-0.5B, in bfloat16."""
    config = copy.deepcopy(SHAPES["Qwen/Qwen2.5-0.5B-Instruct"])
    return save_model(lambda: Qwen2ForCausalLM(config), folder, dtype="bfloat16")


def make_tokenizer(
    *, adds_bos: bool = False, pad_is_eos: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token a character, after `<bos>`, `<eos>`, `<pad>`, `<unk>`."""
    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>" if pad_is_eos else "<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _build(architecture: str, shared: dict[str, object]) -> PreTrainedModel:
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**shared))
    if architecture == "gemma3":
        # As the real one: a layer with a short window beneath one that sees everything.
        layers = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
        return Gemma3ForCausalLM(Gemma3TextConfig(**shared, **layers, query_pre_attn_scalar=32))
    if architecture == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts))
    raise ValueError(f"architecture={architecture!r} is none of qwen3, llama, gemma3, qwen3_moe")

"""Configurations of public models as their authors publish them: enough to size a run, without a download."""

from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config


def _llama(hidden_size: int, *, inner: int, layers: int, heads: int, **more: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        **more,
    )


def _qwen2(
    hidden_size: int,
    *,
    inner: int,
    layers: int,
    heads: int,
    keys: int,
    vocabulary: int,
    tied: bool,
    longest: int = 32_768,
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, PretrainedConfig] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(896, inner=4864, layers=24, heads=14, keys=2, vocabulary=151_936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, inner=18_944, layers=28, heads=28, keys=4, vocabulary=152_064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(
        5120, inner=27_648, layers=64, heads=40, keys=8, vocabulary=152_064, tied=False, longest=131_072
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(
        1536, inner=8960, layers=28, heads=12, keys=2, vocabulary=151_936, tied=False, longest=131_072
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, inner=14_336, layers=32, heads=32),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(8192, inner=28_672, layers=80, heads=64),
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": _llama(4096, inner=14_336, layers=32, heads=32, num_labels=1),
}
"""By their names on the hub."""


def write(name: str, folder: Path) -> Path:
    """A model folder of this shape that holds its config.json alone."""
    SHAPES[name].save_pretrained(folder)
    return folder

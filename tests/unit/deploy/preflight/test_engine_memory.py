"""An engine's share of a GPU, worked out by hand."""

from types import SimpleNamespace

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig

from cluster.contracts.errors import ConfigError
from cluster.contracts.rollout_config import RolloutConfig
from deploy.preflight.engine_memory import EngineMemory, check_divisible, of_engine
from tests.model_shapes import SHAPES

GIB = 2**30
CONTEXT = 1000


def _engine(
    shape: str | SimpleNamespace | PretrainedConfig,
    *,
    tensor_parallel: int = 1,
    num_sequences: int = 0,
    is_quantized: bool = False,
    max_context: int = CONTEXT,
) -> EngineMemory:
    rollout = RolloutConfig.model_construct(
        quantization="int8_per_channel" if is_quantized else None,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=tensor_parallel,
        max_concurrent_sequences=num_sequences,
    )
    text = SHAPES[shape] if isinstance(shape, str) else shape
    numbers = {"num_parameters": 8 * 10**9, "item": 2, "gpu_bytes": 100 * 10**9}
    return of_engine(text, rollout, **numbers, max_context=max_context)


def test_a_token_has_a_key_and_a_value_in_each_layer_and_head():
    assert _engine("Qwen/Qwen3-8B").bytes_per_sequence == CONTEXT * 2 * 36 * 8 * 128 * 2
    assert _engine("Qwen/Qwen2.5-7B-Instruct").bytes_per_sequence == CONTEXT * 2 * 28 * 4 * (3584 // 28) * 2


def test_tensor_parallelism_deals_out_weights_and_heads_and_copies_heads_that_are_too_few():
    four = _engine("Qwen/Qwen3-8B", tensor_parallel=4)
    assert four.weights_bytes == 4 * 10**9 and four.bytes_per_sequence == CONTEXT * 2 * 36 * 2 * 128 * 2
    assert _engine("Qwen/Qwen3-8B", tensor_parallel=16).bytes_per_sequence == CONTEXT * 2 * 36 * 1 * 128 * 2


def made(**more):
    of_all = {"hidden_size": 7168, "vocab_size": 129_280, "num_attention_heads": 128, "intermediate_size": 18_432}
    return SimpleNamespace(**of_all | more)


def test_latent_attention_keeps_a_latent_and_a_rotary_key_for_all_heads_in_each_process():
    """DeepSeek-V3: 61 layers of 512 and 64 numbers. By its 128 heads a token would take 3.5 times as much in each of 8 processes."""
    deepseek = made(num_hidden_layers=61, num_key_value_heads=128, head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64)
    for parallel in (1, 8):
        assert _engine(deepseek, tensor_parallel=parallel).bytes_per_sequence == CONTEXT * 61 * (512 + 64) * 2


def test_layers_without_attention_keep_no_keys():
    """Qwen3-Next: of 48 layers every fourth has attention, with two key-value heads of 256."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    hybrid = made(num_hidden_layers=48, num_key_value_heads=2, head_dim=256, layer_types=kinds)
    assert _engine(hybrid).bytes_per_sequence == CONTEXT * 2 * 12 * 2 * 256 * 2


def test_layers_of_an_mlp_alone_keep_no_keys():
    """Nemotron-H 8B: 24 of Mamba, 24 MLPs, and 4 of attention with 8 key-value heads of 128."""
    kinds = ["linear_attention"] * 24 + ["mlp"] * 24 + ["full_attention"] * 4
    hybrid = made(num_hidden_layers=52, num_key_value_heads=8, head_dim=128, layer_types=kinds)
    assert _engine(hybrid).bytes_per_sequence == CONTEXT * 2 * 4 * 8 * 128 * 2


def test_a_latent_that_vllm_does_not_cache_is_counted_by_heads():
    """MiniCPM3: 62 layers of 40 heads."""
    minicpm = made(
        num_hidden_layers=62, num_key_value_heads=40, num_attention_heads=40, head_dim=96, kv_lora_rank=256,
        qk_rope_head_dim=32, model_type="minicpm3",
    )  # fmt: skip
    assert _engine(minicpm).bytes_per_sequence == CONTEXT * 2 * 62 * 40 * 96 * 2


def test_a_layer_whose_window_slides_keeps_the_window_and_what_one_step_reads():
    """Of Gemma 3 27B's 62 layers 10 see all, and 52 see 1,024 tokens: vLLM deals these to six groups of ten, and two stay empty."""
    gemma = Gemma3TextConfig(num_hidden_layers=62, sliding_window=1024, num_key_value_heads=16, head_dim=128)
    long, short = _engine(gemma, max_context=131_072), _engine(gemma, max_context=16_384)
    assert long.bytes_per_sequence == 2 * 2 * 16 * 128 * (10 * 131_072 + 60 * (1_023 + 16_384))
    assert short.bytes_per_sequence == 2 * 2 * 16 * 128 * 70 * 16_384, "one step may read all of it"


def test_layers_of_both_kinds_that_are_nearly_as_many_are_one_group_each():
    """Seven layers that slide and six that see all, as with a draft's: groups of seven, not of six."""
    kinds = ["sliding_attention", "full_attention"] * 6 + ["sliding_attention"]
    gemma = Gemma2Config(num_hidden_layers=13, layer_types=kinds, num_key_value_heads=4, head_dim=256)
    expected = 2 * 2 * 4 * 256 * (7 * 100_000 + 7 * (4_095 + 16_384))
    assert _engine(gemma, max_context=100_000).bytes_per_sequence == expected


def test_a_window_without_kinds_of_layers_is_that_of_all():
    mistral = MistralConfig(num_hidden_layers=32, sliding_window=4096, num_key_value_heads=8, head_dim=128)
    found = _engine(mistral, max_context=32_768)
    assert found.bytes_per_sequence == 2 * 2 * 8 * 128 * 32 * (4_095 + 16_384)
    left = found.taken_bytes - found.weights_bytes - found.passes_bytes
    assert found.num_tokens // 32_768 == left // found.bytes_per_sequence


def test_the_cache_has_what_weights_and_passes_leave():
    found = _engine("Qwen/Qwen3-8B", num_sequences=100)
    passes = 16_384 * 2 * (4 * 4096 + 3 * 12_288) + 3 * 4 * 100 * 151_936 + 2 * GIB
    assert (found.taken_bytes, found.weights_bytes, found.passes_bytes) == (90 * 10**9, 16 * 10**9, passes)
    assert found.num_tokens == (90 * 10**9 - 16 * 10**9 - passes) // 147_456


def test_a_token_goes_through_all_its_experts_in_a_pass():
    """Qwen3-30B-A3B: 8 experts of 768 for a token, each with an output of 2,048."""
    mixture = Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts_per_tok=8)
    for parallel in (1, 4):
        passes = 16_384 * 2 * (4 * 2048 + 8 * (3 * 768 // parallel + 2048)) + 2 * GIB
        assert _engine(mixture, tensor_parallel=parallel).passes_bytes == passes


def test_heads_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide the model's 32 attention heads"):
        _engine("Qwen/Qwen3-8B", tensor_parallel=3)


@pytest.mark.parametrize(
    ("shape", "size", "refused"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, 4, None),  # two copies of each
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        ({"num_attention_heads": 12}, 6, None),
        ({"num_attention_heads": 4, "intermediate_size": 10}, 4, "intermediate_size of 10"),
        ({"num_attention_heads": 4, "intermediate_size": [8, 10]}, 4, None),
        ({"num_attention_heads": 4, "intermediate_size": 8, "moe_intermediate_size": 6}, 4, "moe_intermediate_size of 6"),
    ],
)  # fmt: skip
def test_every_layer_is_dealt_out_in_equal_shares_or_heads_are_copied(shape, size, refused):
    text = SimpleNamespace(**shape)
    if refused is None:
        return check_divisible(text, size)
    with pytest.raises(
        ConfigError, match=rf"^rollout.tensor_parallel_size={size} does not divide the model's {refused};"
    ):
        check_divisible(text, size)

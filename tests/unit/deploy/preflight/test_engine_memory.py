"""An engine's share of a GPU, worked out by hand."""

from types import SimpleNamespace

import pytest

from cluster.contracts.errors import ConfigError
from deploy.preflight.engine_memory import EngineMemory, check_divisible, of_engine
from tests.model_shapes import SHAPES

GIB = 2**30


def _engine(
    shape: str | SimpleNamespace, *, tensor_parallel: int = 1, num_sequences: int = 0, is_quantized: bool = False
) -> EngineMemory:
    return of_engine(
        SHAPES[shape] if isinstance(shape, str) else shape,
        num_parameters=8 * 10**9,
        item=2,
        is_quantized=is_quantized,
        gpu_bytes=100 * 10**9,
        utilization=0.9,
        tensor_parallel=tensor_parallel,
        num_sequences=num_sequences,
    )


def test_a_token_has_a_key_and_a_value_in_each_layer_and_head():
    assert _engine("Qwen/Qwen3-8B").bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert _engine("Qwen/Qwen2.5-7B-Instruct").bytes_per_token == 2 * 28 * 4 * (3584 // 28) * 2


def test_tensor_parallelism_deals_out_weights_and_heads_and_copies_heads_that_are_too_few():
    four = _engine("Qwen/Qwen3-8B", tensor_parallel=4)
    assert four.weights_bytes == 4 * 10**9 and four.bytes_per_token == 2 * 36 * 2 * 128 * 2
    assert _engine("Qwen/Qwen3-8B", tensor_parallel=16).bytes_per_token == 2 * 36 * 1 * 128 * 2


def made(**more):
    of_all = {"hidden_size": 7168, "vocab_size": 129_280, "num_attention_heads": 128, "intermediate_size": 18_432}
    return SimpleNamespace(**of_all | more)


def test_latent_attention_keeps_a_latent_and_a_rotary_key_for_all_heads_in_each_process():
    """DeepSeek-V3: 61 layers of 512 and 64 numbers. By its 128 heads a token would take 3.5 times as much in each of 8 processes."""
    deepseek = made(num_hidden_layers=61, num_key_value_heads=128, head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64)
    for parallel in (1, 8):
        assert _engine(deepseek, tensor_parallel=parallel).bytes_per_token == 61 * (512 + 64) * 2


def test_layers_without_attention_keep_no_keys():
    """Qwen3-Next: of 48 layers every fourth has attention, with two key-value heads of 256."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    hybrid = made(num_hidden_layers=48, num_key_value_heads=2, head_dim=256, layer_types=kinds)
    assert _engine(hybrid).bytes_per_token == 2 * 12 * 2 * 256 * 2


def test_layers_of_an_mlp_alone_keep_no_keys():
    """Nemotron-H 8B: 24 of Mamba, 24 MLPs, and 4 of attention with 8 key-value heads of 128."""
    kinds = ["linear_attention"] * 24 + ["mlp"] * 24 + ["full_attention"] * 4
    hybrid = made(num_hidden_layers=52, num_key_value_heads=8, head_dim=128, layer_types=kinds)
    assert _engine(hybrid).bytes_per_token == 2 * 4 * 8 * 128 * 2


def test_a_latent_that_vllm_does_not_cache_is_counted_by_heads():
    """MiniCPM3: 62 layers of 40 heads."""
    minicpm = made(
        num_hidden_layers=62, num_key_value_heads=40, num_attention_heads=40, head_dim=96, kv_lora_rank=256,
        qk_rope_head_dim=32, model_type="minicpm3",
    )  # fmt: skip
    assert _engine(minicpm).bytes_per_token == 2 * 62 * 40 * 96 * 2


def test_the_cache_has_what_weights_and_passes_leave():
    found = _engine("Qwen/Qwen3-8B", num_sequences=100)
    passes = 16_384 * 2 * (4 * 4096 + 3 * 12_288) + 3 * 4 * 100 * 151_936 + 2 * GIB
    assert (found.taken_bytes, found.weights_bytes, found.passes_bytes) == (90 * 10**9, 16 * 10**9, passes)
    assert found.num_tokens == (90 * 10**9 - 16 * 10**9 - passes) // 147_456


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

"""The policy's log-probs and their gradients are those of the model's own logits, whatever its family does to them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    modeling_utils,
)
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.integrations import flash_attention as transformers_flash

from cluster.contracts.config import ModelConfig, RunConfig, SamplingConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import Ranks
from learner.model import building
from learner.model.attention import PACKED
from learner.model.building import build
from learner.model.head import Head
from learner.model.packing import Layout, MicroBatch, lay_out
from learner.model.policy import (
    PolicyModel,
    TokenOutputs,
    choose_layout,
    hidden_states,
    load,
    prove,
    token_row,
    unproven,
    without_dropout,
)
from tests.models import make_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def _with_bias() -> PreTrainedModel:
    causal_lm = LlamaForCausalLM(LlamaConfig(**SIZES))
    causal_lm.lm_head = nn.Linear(32, 128, bias=True)
    nn.init.normal_(causal_lm.lm_head.bias)
    return causal_lm


def _wrapped() -> PreTrainedModel:
    """A model with a vision tower: what it does to logits stands in its text model's configuration."""
    text = SIZES | {"head_dim": 8, "final_logit_softcapping": 2.0, "num_kv_shared_layers": 0}
    text |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 0}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=None, audio_config=None))


HEADS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "bias": _with_bias,
    "soft-capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "soft-capped within another": _wrapped,
    "scaled-up": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "scaled-down": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}


@pytest.mark.parametrize("name", HEADS)
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(name: str):
    torch.manual_seed(0)
    causal_lm = HEADS[name]().eval()
    model = ModelConfig(path="made here", dtype="float32")
    policy = prove(
        causal_lm, model=model, packing="auto", sampling=SamplingConfig(temperature=0.8), head_chunk_tokens=16
    )
    row = token_row([5, 6, 7], [8, 9, 10, 11])
    logprobs_C = policy(lay_out([row], [0], layout=policy.layout, width=4)).logprobs_C
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11])
    expected_LV = (causal_lm(ids[None]).logits[0] / 0.8).log_softmax(-1)[2:-1]
    expected_C = expected_LV.gather(1, ids[3:, None])[:, 0]
    assert_close(logprobs_C, expected_C, rtol=1e-4, atol=1e-4)
    weights = dict(causal_lm.named_parameters())
    weighting_C = torch.tensor([1.0, -2.0, 0.5, 3.0])
    found = torch.autograd.grad((logprobs_C * weighting_C).sum(), list(weights.values()))
    expected = torch.autograd.grad((expected_C * weighting_C).sum(), list(weights.values()))
    for parameter, own, other in zip(weights, found, expected, strict=True):
        assert_close(own, other, rtol=1e-3, atol=1e-4, msg=lambda text, at=parameter: f"{at}: {text}")


def proven(causal_lm: PreTrainedModel, *, packing: str = "auto", max_context: int | None = None) -> PolicyModel:
    model = ModelConfig(path="made here", dtype="float32", max_context=max_context)
    return prove(
        causal_lm.eval(), model=model, packing=packing, sampling=SamplingConfig(temperature=1.0), head_chunk_tokens=16
    )


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_large_logits_are_proven_in_bfloat16_at_any_temperature(temperature: float):
    """The model's own head rounds logits of 16 to 32 to 1/8, which a temperature of 0.1 made more than a nat."""
    torch.manual_seed(1)
    causal_lm = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().bfloat16()
    causal_lm.lm_head.weight.data.mul_(4)
    model, sampling = ModelConfig(path="made here"), SamplingConfig(temperature=temperature)
    policy = prove(causal_lm, model=model, packing="auto", sampling=sampling, head_chunk_tokens=16)
    assert policy.layout == "shared" and policy.head.temperature == temperature
    assert policy.own_logits(torch.arange(5, 25)).abs().max() > 16
    assert causal_lm(torch.arange(5, 25)[None]).logits.dtype == torch.bfloat16


def test_a_run_that_samples_from_a_few_tokens_is_proven_over_all_of_them():
    causal_lm, model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), ModelConfig(path="made here", dtype="float32")
    truncation: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    sampling = SamplingConfig(**truncation)
    policy = prove(causal_lm, model=model, packing="auto", sampling=sampling, head_chunk_tokens=16)
    assert policy.layout == "shared" and policy.head == Head(chunk_tokens=16, **truncation)


def test_a_proof_for_which_memory_does_not_suffice_is_not_made_in_another_layout():
    policy = unproven(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), sampling=SamplingConfig(), head_chunk_tokens=None)

    def full(batch: MicroBatch) -> TokenOutputs:
        raise torch.OutOfMemoryError if policy.layout == "shared" else AssertionError(policy.layout)

    model = ModelConfig(path="made here", dtype="float32")
    with pytest.raises(torch.OutOfMemoryError):
        choose_layout(
            policy, forward=full, own_logits=policy.own_logits, model=model, packing="auto", dtype=torch.float32
        )


def test_gradients_of_the_token_before_many_completions_are_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    hidden = torch.zeros(1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    causal_lm: Any = SimpleNamespace(base_model=lambda **inputs: (hidden,))
    batch = lay_out([token_row([1], [2])] * 512, [*range(512)], layout="shared", width=1)
    found = hidden_states(causal_lm, batch)
    found.sum().backward()
    assert found.dtype == torch.bfloat16 and hidden.grad is not None
    assert hidden.grad[0, :, 0].tolist() == [512.0, 0.0]


def windowed_phimoe(window: int | None) -> PreTrainedModel:
    """Its layers see a window by their mask alone."""
    torch.manual_seed(0)
    config = PhimoeConfig(**SIZES, num_local_experts=4, max_position_embeddings=128, sliding_window=window)
    causal_lm = PhimoeForCausalLM(config)
    for parameter in causal_lm.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return causal_lm


def test_a_window_that_is_in_masks_alone_keeps_rows_apart_where_a_sequence_may_be_longer():
    """The proof's rows are shorter than any window: packed, sixty tokens were two nats off."""
    assert proven(windowed_phimoe(32), max_context=32).layout == proven(windowed_phimoe(None)).layout == "shared"
    causal_lm = windowed_phimoe(32)
    policy = proven(causal_lm)
    assert policy.layout == "padded"
    ids = [(7 * i + 3) % 128 for i in range(60)]
    row = token_row(ids[:1], ids[1:])
    logprobs_C = policy(lay_out([row], [0], layout=policy.layout, width=59)).logprobs_C
    expected_LV = causal_lm(torch.tensor(ids)[None]).logits[0].log_softmax(-1)[:-1]
    assert_close(logprobs_C, expected_LV.gather(1, torch.tensor(ids)[1:, None])[:, 0], rtol=1e-4, atol=1e-4)


def test_a_window_that_attention_is_told_of_packs():
    before = modeling_utils.ALL_ATTENTION_FUNCTIONS[PACKED]
    assert proven(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))).layout == "shared"
    assert modeling_utils.ALL_ATTENTION_FUNCTIONS[PACKED] is before


def recurrent() -> PreTrainedModel:
    """Each token reads a state that all before it in the row have written."""
    torch.manual_seed(0)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | {"initializer_range": 0.1}, head_dim=8, **experts, **heads))


def test_a_layer_through_which_a_sequence_reads_those_before_it_is_found_in_bfloat16_too():
    """It moves log-probs by less than the tolerance of bfloat16, so only an exchange of neighbours shows it."""
    assert proven(recurrent().bfloat16()).layout == "padded"
    assert proven(LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()).layout == "shared"


def reads_the_mask() -> PreTrainedModel:
    config = DeepseekV32Config(
        **SIZES | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
        **{"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8},
    )
    return DeepseekV32ForCausalLM(config)


def test_a_model_that_reads_the_mask_itself_is_padded():
    causal_lm = reads_the_mask()
    assert proven(causal_lm).layout == "padded"
    with pytest.raises(ConfigError, match=r"learner\.packing=packed: DeepseekV32ForCausalLM"):
        proven(causal_lm, packing="packed")


def test_a_model_without_a_backbone_of_its_own_is_refused():
    sizes = SIZES | {"intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2}
    with pytest.raises(ConfigError, match="a Llama4ForCausalLM has no backbone 'language_model'"):
        proven(Llama4ForCausalLM(Llama4TextConfig(**sizes)))


def test_layers_that_checkpoint_their_activations_draw_no_experts(tmp_path: Path):
    """While it trains, PhiMoE's router samples experts, and the learner's policy would be another one than the sampler's."""
    windowed_phimoe(None).save_pretrained(tmp_path)
    learner = {"activation_checkpointing": True}
    model = {"path": str(tmp_path), "dtype": "float32"}
    config = RunConfig.model_validate({"model": model, "prompts": "file", "learner": learner})
    networks, _ = build(config, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))
    calls: list[nn.Module] = []
    layer = networks.policy.causal_lm.base_model.layers[0]
    layer.self_attn.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    batch = lay_out([token_row([5, 6, 7], [*range(8, 40)])], [0], layout=networks.policy.layout, width=32)
    first, second = (networks(batch)[0].logprobs_C for _ in range(2))
    assert first.equal(second)
    calls.clear()
    first.sum().backward()
    assert calls, "it is computed again for the gradients"


def scores_beyond_their_cap(folder: Path) -> Path:
    """A model whose attention caps its scores at 50, and whose scores are larger."""
    torch.manual_seed(0)
    causal_lm = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=50.0))
    for name, parameter in causal_lm.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(5)
    causal_lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("packing", "layout"), [("auto", "shared"), ("padded", "padded")])
def test_a_soft_cap_of_attention_is_computed_with_in_every_layout(tmp_path: Path, packing: str, layout: Layout):
    """transformers' sdpa leaves it out."""
    path = scores_beyond_their_cap(tmp_path)
    loaded = load(ModelConfig(path=str(path), dtype="float32"), dtype=torch.float32)
    policy = proven(loaded, packing=packing)
    assert policy.layout == layout
    row = token_row([5, 6, 7], [8, 9, 10, 11])
    logprobs_C = policy(lay_out([row], [0], layout=layout, width=4)).logprobs_C
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11])
    expected_LV = Gemma2ForCausalLM.from_pretrained(path, attn_implementation="eager")(ids[None]).logits[0]
    expected_C = expected_LV.log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]
    assert_close(logprobs_C, expected_C, rtol=1e-4, atol=1e-4)


def kernel_of_16_bits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, position_ids: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Stands for the package's: [1, T, A, D]; a sequence begins at each position 0."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    sequence_T = (position_ids[0] == 0).cumsum(0)
    mask_TT = (sequence_T[:, None] == sequence_T).tril()
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask_TT, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def _has_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **options: True)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *args, **options: None)
    monkeypatch.setattr(transformers_flash, "_flash_attention_forward", kernel_of_16_bits)


def built_with_flash_attention(path: Path, **model: Any) -> PolicyModel:
    model = {"path": str(path), "attention": "flash_attention_2", **model}
    run = RunConfig.model_validate({"model": model, "prompts": "file"})
    return build(run, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))[0].policy


@pytest.mark.usefixtures("_has_flash_attention")
def test_an_only_rank_packs_with_flash_attention_whose_kernels_take_16_bits(tmp_path: Path):
    """It proves its model in float32, which they refuse."""
    policy = built_with_flash_attention(make_tiny_model(tmp_path))
    assert policy.layout == "packed"
    assert policy.causal_lm.config._attn_implementation == "flash_attention_2"


@pytest.mark.usefixtures("_has_flash_attention")
def test_a_window_that_flash_attention_is_not_told_of_is_refused_where_a_sequence_may_be_longer(tmp_path: Path):
    """It takes no masks. The proof's rows are shorter than any window: the learner's policy would be another one than the sampler's."""
    masked, told = tmp_path / "masked", tmp_path / "told"
    windowed_phimoe(32).save_pretrained(masked)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).save_pretrained(told)
    with pytest.raises(ConfigError, match=r"PhimoeForCausalLM has its window of 32 .*use model\.attention=auto"):
        built_with_flash_attention(masked)
    assert built_with_flash_attention(masked, max_context=32).layout == "packed"
    assert built_with_flash_attention(told).layout == "packed"


def test_an_attention_that_leaves_out_the_models_soft_cap_is_refused(tmp_path: Path):
    path = scores_beyond_their_cap(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.attention='sdpa' .* soft cap of 50 .*use model\.attention=auto"):
        load(ModelConfig(path=str(path), attention="sdpa"), dtype=torch.float32)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


def test_pickled_weights_that_contain_code_are_refused_and_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = make_tiny_model(tmp_path / "model")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Harmful()}, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.path='.*model': its pickled weights are damaged or contain code"):
        load(ModelConfig(path=str(path)), dtype=torch.float32)
    assert not Path("harmed").exists()


def test_a_model_whose_layers_cannot_be_checkpointed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_tiny_model(tmp_path)
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    run = RunConfig.model_validate(
        {"model": {"path": str(path)}, "prompts": "file", "learner": {"activation_checkpointing": True}}
    )
    with pytest.raises(ConfigError, match=r"learner\.activation_checkpointing=true: a Qwen3ForCausalLM has no layers"):
        build(run, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))


def test_a_model_of_which_one_tensor_is_stored_for_several_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Weights are exported one by one, and a part of such a tensor would be written in its place."""
    path = make_tiny_model(tmp_path)
    fused = WeightConverter("qkv_proj.weight", ["q_proj.weight", "k_proj.weight"], operations=[Chunk(dim=0)])
    monkeypatch.setattr(building, "get_model_conversion_mapping", lambda *_, **__: [fused])
    run = RunConfig.model_validate({"model": {"path": str(path)}, "prompts": "file"})
    with pytest.raises(ConfigError, match=r"a Qwen3ForCausalLM is stored with several layers in one tensor"):
        build(run, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))


def test_quantized_weights_are_refused(tmp_path: Path):
    path = make_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    run = RunConfig.model_validate({"model": {"path": str(path)}, "prompts": "file"})
    with pytest.raises(ConfigError, match=r"has quantized weights \(mxfp4\).*form in bfloat16"):
        build(run, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))


@pytest.mark.parametrize("name", ["activation_dropout", "resid_pdrop", "layerdrop"])
def test_a_layer_drops_nothing_by_whatever_name_it_has_a_rate(name: str):
    layer = nn.Module()
    setattr(layer, name, 0.1)
    without_dropout(nn.Sequential(layer))
    assert getattr(layer, name) == 0.0


def test_a_loaded_model_has_no_dropout(tmp_path: Path):
    path = make_tiny_model(tmp_path)
    config = (path / "config.json").read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5')
    assert "0.5" in config
    (path / "config.json").write_text(config)
    causal_lm = load(ModelConfig(path=str(path), dtype="float32"), dtype=torch.float32).train()
    ids = torch.arange(5, 25)[None]
    assert torch.equal(causal_lm(ids).logits, causal_lm(ids).logits)


LONG = [2.0, 4.0, 8.0, 16.0]


def longrope() -> Phi3ForCausalLM:
    """Trained on 16 positions, and stretched to 64."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": LONG}
    positions: dict[str, Any] = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    config = Phi3Config(**SIZES, **positions, rope_parameters=rope, bos_token_id=1, eos_token_id=2)
    return Phi3ForCausalLM(config).eval()


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_sequence_of_a_longrope_model_does_not_depend_on_the_longest_one_of_its_pass(packing: str):
    model = ModelConfig(path="made here", dtype="float32")
    policy = prove(longrope(), model=model, packing=packing, sampling=SamplingConfig(), head_chunk_tokens=16)
    rows = [token_row([5, 6, 7], [8, 9, 10, 11]), token_row([5, 6], list(range(8, 38)))]
    alone, beside = (lay_out(rows, chosen, layout=policy.layout, width=30) for chosen in ([0], [0, 1]))
    assert_close(alone.scatter(policy(alone).logprobs_C)[0], beside.scatter(policy(beside).logprobs_C)[0])


@pytest.mark.parametrize(("max_context", "factors"), [(16, [1.0] * 4), (17, LONG), (None, LONG)])
def test_a_longrope_model_rotates_by_the_longest_context_of_the_run_as_the_engine_does(
    tmp_path: Path, max_context: int | None, factors: list[float]
):
    causal_lm = longrope()
    causal_lm.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32", max_context=max_context)
    prove(causal_lm, model=model, packing="auto", sampling=SamplingConfig(), head_chunk_tokens=16)
    run = RunConfig.model_validate({"model": model.model_dump(), "prompts": "file"})
    networks, _ = build(run, ranks=Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))
    # 10000^(-i / 4) over the factors, for the pairs i of a head of 8.
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001]) / torch.tensor(factors)
    for each in (causal_lm, networks.policy.causal_lm):
        assert_close(each.get_buffer("model.rotary_emb.inv_freq"), expected)

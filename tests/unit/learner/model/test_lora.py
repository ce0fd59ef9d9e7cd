"""Adapters are on linear layers alone, those of a mixture too, and peft reads what is saved of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cluster.contracts.errors import ConfigError
from cluster.contracts.learner_config import LoraConfig
from cluster.weights.adapter import write_adapter
from learner.model.lora import adapter_of, adapters, add_adapters
from tests.unit.learner.model.test_policy import SIZES

MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "phimoe, whose routers are a kind of linear layer": lambda: PhimoeForCausalLM(
        PhimoeConfig(**SIZES, num_local_experts=4)
    ),
}


def adapted(causal_lm: PreTrainedModel, **lora: Any) -> list[str]:
    """The layers that have adapters."""
    add_adapters(causal_lm, lora=LoraConfig(rank=2, **lora), seed=0)
    return [name.removesuffix(".lora_A.default.weight") for name, _ in causal_lm.named_parameters() if "lora_A" in name]


@pytest.mark.parametrize("name", MIXTURES)
def test_all_linear_layers_of_a_mixture_are_those_of_its_attention(name: str):
    """peft adds experts and routers by the names that they had in transformers 4, and they could not be merged."""
    layers = [f"model.layers.{layer}.self_attn.{each}_proj" for layer in range(2) for each in "qkvo"]
    assert sorted(adapted(MIXTURES[name]())) == sorted(layers)


def test_a_router_that_is_a_linear_layer_is_none_of_all_linear_layers():
    """AFMoE has such a one."""
    config = AfmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert [name for name in adapted(AfmoeForCausalLM(config)) if "router" in name] == []


def test_the_gate_of_a_shared_expert_is_none_of_all_linear_layers():
    """It has one output: its adapter would be larger, and vLLM would pass it over."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen2MoeConfig(**SIZES, **experts, shared_expert_intermediate_size=16)
    assert {name.rpartition(".")[2] for name in adapted(Qwen2MoeForCausalLM(config))} == {
        *(f"{each}_proj" for each in "qkvo"),
        *(f"{each}_proj" for each in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("name", MIXTURES)
def test_peft_reads_the_saved_adapter_of_a_mixture(tmp_path: Path, name: str):
    causal_lm = MIXTURES[name]().eval()
    causal_lm.save_pretrained(tmp_path / "base")
    adapted(causal_lm)
    for parameter in causal_lm.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapter = adapter_of(causal_lm, lora=LoraConfig(rank=2))
    write_adapter(
        tmp_path / "adapter",
        adapters(causal_lm, dtype=torch.float32),
        adapter=adapter,
        base_model=str(tmp_path / "base"),
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(5, 25)[None]
    assert not torch.allclose(base(ids).logits, causal_lm(ids).logits, atol=0.1)
    assert_close(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits, causal_lm(ids).logits)


def test_all_linear_layers_leave_the_vocabulary_head_out():
    assert not any("lm_head" in name for name in adapted(LlamaForCausalLM(LlamaConfig(**SIZES))))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gate", r"target_modules names model\.layers\.0\.mlp\.gate, a MixtralTopKRouter; only linear layers"),
        ("lm_head", "names the vocabulary head"),
        ("query", r"target_modules=\['query'\]: no layer of the model is named so"),
    ],
)
def test_other_layers_are_refused(target: str, message: str):
    with pytest.raises(ConfigError, match=message):
        adapted(MIXTURES["mixtral"](), target_modules=(target,))

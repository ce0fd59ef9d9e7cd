"""A layer that a real vLLM calls without its adapter, in an engine alone in its process: two share what the first one's end takes away."""

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from actors.chat.formatter import ChatFormatter
from actors.rollout.vllm_engine import VllmEngine
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import WeightsError
from cluster.weights.adapter import PREFIX
from cluster.weights.manifest import Adapter
from tests.integration.engines import place
from tests.models import save_model

pytestmark = [pytest.mark.engine]


def test_an_adapter_on_the_gate_of_a_shared_expert_is_refused(tmp_path):
    """Qwen2-MoE's: vLLM puts the adapter around the layer, and the expert goes on calling the layer."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape = Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=32, vocab_size=128)
    model = save_model(lambda: Qwen2MoeForCausalLM(shape), tmp_path / "model", dtype="bfloat16")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16", "max_context": 128},
            "prompts": "none",
            "learner": {"lora": {"rank": 4, "publish": "adapter"}},
            "rollout": place(),
        }
    )
    engine = VllmEngine(config, formatter=ChatFormatter.load(config.model), num_threads=1)
    name = "model.layers.0.mlp.shared_expert_gate"
    named = {f"{PREFIX}{name}.lora_A.weight": torch.ones(4, 64), f"{PREFIX}{name}.lora_B.weight": torch.ones(1, 4)}
    with pytest.raises(WeightsError, match=f"no place for 1 parts of the adapter, the first of them {name}"):
        engine.load_adapter(iter(named.items()), Adapter(rank=4, alpha=4, target_modules=("shared_expert_gate",)))

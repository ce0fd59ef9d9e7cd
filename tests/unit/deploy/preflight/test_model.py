"""Models that vLLM's build for CPUs cannot serve are refused before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, LlamaConfig

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight import check, check_evaluation
from deploy.preflight.model import HEADS_ON_CPUS, check_heads
from tests.models import make_tiny_model
from tests.unit.deploy.preflight.runs import run

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}


def config_of(folder: Path, *, gpus: int = 0) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": str(folder)}, "prompts": "none", "rollout": {"gpus_per_worker": gpus}}
    )


def test_heads_that_attention_on_cpus_cannot_compute_are_refused_with_the_sizes_that_it_can(tmp_path: Path):
    """Seen before: 64 / 4 = 16, and an engine said `Unsupported CPU attention configuration: head_dim=16` after the actors had started."""
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^model\.path=.* heads of size 16, .* 32, 64, .*; use another model, or .*gpus_per_worker=1$",
    ):
        check_heads(config_of(tmp_path))
    check_heads(config_of(tmp_path, gpus=1))
    LlamaConfig(**SMALL, head_dim=32).save_pretrained(tmp_path)
    check_heads(config_of(tmp_path))


def test_latent_attention_has_kernels_for_other_sizes(tmp_path: Path):
    DeepseekV3Config(**SMALL, kv_lora_rank=16, qk_rope_head_dim=16).save_pretrained(tmp_path)
    check_heads(config_of(tmp_path))


@pytest.mark.slow
def test_a_check_of_a_run_or_an_evaluation_names_the_heads(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    LlamaConfig(**SMALL, vocab_size=128, head_dim=16).save_pretrained(model)
    for checks in (check, check_evaluation):
        with pytest.raises(ConfigError, match="heads of size 16"):
            checks(run(tmp_path, model))


@pytest.mark.engine
@pytest.mark.slow
def test_the_sizes_are_those_of_vllm():
    code = (
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as B; print(*B.get_supported_head_sizes())"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert asked.stdout.splitlines()[-1].split() == list(map(str, HEADS_ON_CPUS))

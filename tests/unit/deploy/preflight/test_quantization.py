"""`rollout.quantization` where vLLM has no kernel for it, or the model no layers that it takes, is refused before anything starts."""

import platform
from types import SimpleNamespace
from typing import Any

import pytest

import learner.model.compute_type as machine
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight import check_assumed, compute_type, quantization
from deploy.preflight.engine_memory import weights_bytes
from deploy.preflight.hardware import parse
from deploy.preflight.machine import estimate
from deploy.preflight.quantization import check_layers, check_quantization, overflow_rows
from deploy.preflight.report import mathematics_rows, quantized_sampling
from tests.fakes import run_config
from tests.model_shapes import SHAPES, write

DENSE = SHAPES["Qwen/Qwen3-8B"]
TIS = {"corrections": ["tis"], "proximal": "recompute"}


def quantized(
    scheme: str = "int8_per_channel", *, gpus: int = 0, dtype: str = "bfloat16", **sections: Any
) -> RunConfig:
    rollout = {"quantization": scheme, "gpus_per_worker": gpus, **sections.pop("rollout", {})}
    return run_config(rollout=rollout, **{"model": {"path": "model", "dtype": dtype}, **sections})


@pytest.mark.parametrize("scheme", ["int8_per_channel", "fp8_per_channel"])
def test_schemes_that_a_cpu_has_kernels_for_pass(scheme):
    check_quantization(quantized(scheme), is_local=True)


def test_without_a_scheme_nothing_is_asked():
    check_quantization(run_config(model={"path": "model", "dtype": "float32"}), is_local=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            quantized("fp8_per_block"),
            "rollout.quantization='fp8_per_block' has no kernel in vLLM's build for CPUs; use int8_per_channel or fp8_per_channel",
        ),
        (quantized("fp8_per_tensor"), "rollout.quantization='fp8_per_tensor' has no kernel"),
        (
            quantized(dtype="float32"),
            "rollout.quantization='int8_per_channel' with model.dtype='float32': .*; use model.dtype=bfloat16",
        ),
        (quantized(learner={"lora": {"publish": "adapter"}}), "learner.lora.publish='adapter': .*publish=merged"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(config, said):
    with pytest.raises(ConfigError, match=f"^{said}" if said.startswith("rollout") else said):
        check_quantization(config, is_local=True)


def test_adapters_that_are_merged_are_quantized_as_any_weights():
    check_quantization(quantized(learner={"lora": {"publish": "merged"}}), is_local=True)


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_needs_gpus_that_multiply_it(monkeypatch, capability, is_refused):
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda number: [(9, 0), capability][number])
    monkeypatch.setattr(quantization, "asked_of_gpus", lambda question: getattr(machine, question)())
    fp8, int8 = quantized("fp8_per_block", gpus=1), quantized("int8_per_channel", gpus=1)
    check_quantization(int8, is_local=True)
    check_quantization(fp8, is_local=False)
    if not is_refused:
        return check_quantization(fp8, is_local=True)
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 8\.9 or more"):
        check_quantization(fp8, is_local=True)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="on other processors both of these questions may have the answer no"
)
def test_a_question_is_answered_in_a_process_of_its_own(monkeypatch):
    """One whose answer is yes also where no GPU is."""
    questions = ("is_bfloat16_fast_on_cpu", "multiplies_in_float32")
    (asked,) = (each for each in questions if getattr(machine, each)())
    monkeypatch.setattr(machine, asked, lambda: pytest.fail("asked in this process"))
    assert compute_type.asked_of_gpus(asked)


def test_a_mixture_of_experts_is_refused():
    mixture = SimpleNamespace(num_experts=8)
    with pytest.raises(ConfigError, match="of a mixture of experts: its routers would be rounded too"):
        check_layers(mixture, quantized())
    check_layers(mixture, run_config())


@pytest.mark.parametrize(
    ("sizes", "parallel", "said"),
    [
        ({"num_key_value_heads": 1, "head_dim": 64}, 1, None),
        ({"hidden_size": 960}, 1, "hidden_size is 960;"),
        ({"intermediate_size": 4864 // 2}, 2, "intermediate_size is 1216 in each process"),
        ({"num_attention_heads": 9, "head_dim": 64}, 1, "heads' size is 576"),
    ],
)
def test_blocks_of_fp8_are_whole(sizes, parallel, said):
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2} | sizes
    text, config = (
        SimpleNamespace(**shape),
        quantized("fp8_per_block", gpus=1, rollout={"tensor_parallel_size": parallel}),
    )
    if said is None:
        return check_layers(text, config)
    with pytest.raises(ConfigError, match=f"inputs in whole blocks of 128, and the model's {said}"):
        check_layers(text, config)
    check_layers(text, quantized("fp8_per_channel", gpus=1))


def test_embeddings_and_head_keep_their_two_bytes():
    # 151,936 tokens of 4,096 numbers, twice; the rest of 8 billion has one byte.
    kept = 2 * 151_936 * 4096
    of = {"num_parameters": 8 * 10**9, "item": 2}
    assert weights_bytes(DENSE, quantized().rollout, **of) == 8 * 10**9 + kept
    assert weights_bytes(DENSE, run_config().rollout, **of) == 16 * 10**9
    tied = SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
    assert weights_bytes(tied, quantized().rollout, num_parameters=10**9, item=2) == 10**9 + 151_936 * 896


def test_an_engine_takes_less_memory_and_the_learner_as_much_as_before(tmp_path):
    path = write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    own = {"path": str(path)}
    whole = estimate(run_config(model=own), frozenset(), is_local=False)
    halved = estimate(quantized(model=own), frozenset(), is_local=False)
    assert whole.worker - halved.worker == 494_032_768 - 151_936 * 896 and whole.rank == halved.rank


def test_a_gpus_cache_has_what_smaller_weights_leave(tmp_path):
    """Of 494,032,768 parameters 136,134,656 embeddings keep two bytes: 0.92 GiB become 0.59."""
    own = {"path": str(write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)), "max_context": 2048}

    def memory(**rollout: Any) -> str:
        config = run_config(model=own, learner={"gpus_per_rank": 1}, rollout={"gpus_per_worker": 1, **rollout})
        rows = check_assumed(config, parse(["gpus=2x80GB"])).rows
        return next(value for _, name, value in rows if name == "engine, each GPU")

    assert "weights 0.9," in memory() and "weights 0.6," in memory(quantization="fp8_per_channel")


def test_hardware_that_is_not_at_hand_is_held_against_the_scheme_too(tmp_path):
    own = {"path": str(write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)), "max_context": 2048, "dtype": "float32"}
    config = quantized(
        "fp8_per_block", gpus=1, model=own, learner={"gpus_per_rank": 1}, rollout={"tensor_parallel_size": 2}
    )
    with pytest.raises(ConfigError) as refused:
        check_assumed(config, parse(["gpus=4x80GB"]))
    assert "use model.dtype=bfloat16" in str(refused.value) and "whole blocks of 128" in str(refused.value)


def test_a_correction_is_recommended_where_none_is_set():
    told = quantized_sampling(quantized())
    assert told is not None and "[tis] with algorithm.proximal=recompute" in told
    assert ("algorithm", "note", told) in mathematics_rows(quantized(), frozenset())
    assert quantized_sampling(quantized(algorithm=TIS)) is None
    assert quantized_sampling(run_config()) is None


@pytest.mark.parametrize(
    ("flags", "config", "is_local", "is_told"),
    [
        ({"avx2"}, quantized(), True, True),
        ({"avx2", "avx_vnni"}, quantized(), True, False),
        ({"avx512f", "avx512_vnni"}, quantized(), True, False),
        (set(), quantized(), True, False),
        ({"avx2"}, quantized(), False, False),
        ({"avx2"}, quantized(gpus=1), True, False),
        ({"avx2"}, quantized("fp8_per_channel"), True, False),
    ],
)
def test_products_that_overflow_on_this_processor_are_told_of(flags, config, is_local, is_told, monkeypatch):
    monkeypatch.setattr(quantization, "cpu_facts", lambda: (frozenset(flags), "GenuineIntel"))
    told = [text for _, _, text in overflow_rows(config, is_local=is_local)]
    assert ["this processor has no VNNI" in text for text in told] == [True] * is_told
